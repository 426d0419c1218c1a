"""Judges task 3.22: all valid layouts, those that fit, and the fastest first."""

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

from distlab.grade import Grade, check, check_cost, task
from distlab.util.text import bytes_text, counted, seconds_text
from judging.checks import check_refused
from phase3 import estimates as b
from phase3 import planner_reference as reference
from phase3_multi_node.given import Layout, Machine, Memory, Plan, StepTime, Transformer

EXACT = 1e-6
SMALL = Transformer(6, 768, 6, 512, 1024)
Case = tuple[Transformer, Machine, int]


def _machine(nodes: int, gpus_per_node: int) -> Machine:
    return reference.A100._replace(nodes=nodes, gpus_per_node=gpus_per_node)


def _cases(grade: Grade) -> list[Case]:
    drawn = [_drawn_case(grade.random) for _ in range(12)]
    return [
        *drawn,
        (Transformer(1, 64, 4, 8, 8), _machine(1, 1), 1),
        (Transformer(2, 64, 2, 8, 8), _machine(1, 2), 2),
        (SMALL, _machine(2, 4), 8),
        (SMALL._replace(length=511), _machine(1, 4), 4),
        (SMALL._replace(heads=8), _machine(4, 2), 8),
        (SMALL._replace(heads=12), _machine(2, 6), 36),
        (reference.GPT3, _machine(128, 8), 1536),
    ]


def _drawn_case(random: Random) -> Case:
    """Draw a case whose sizes have factors 2, 3 and 5, so that not all divide one another."""
    layers, heads = random.choice((1, 5, 6, 8, 12, 20)), random.choice((1, 4, 6, 10, 12))
    model = SMALL._replace(layers=layers, heads=heads, length=random.choice((511, 512, 600)))
    machine = _machine(random.choice((1, 2, 3, 5)), random.choice((1, 2, 4, 6, 8, 10)))
    return model, machine, random.choice((7, 12, 30, 40, 64, 96))


@task("3.22")
def test_layouts_are_all_that_are_valid(grade: Grade) -> None:
    cases = _cases(grade)
    for case, rows in zip(cases, grade.call(b.layouts_of, cases), strict=True):
        expected = dict.fromkeys(reference.layouts(*case), 1)
        counts = Counter(Layout(*row) for row in rows)
        here = _text(case)
        for layout, times in counts.items():
            check(
                layout in expected,
                f"{here}: {layout} is not valid. {reference.broken_rule(*case, layout)}",
            )
            check(times == 1, f"{here}: {layout} should come once; it came {times} times.")
        missing = [layout for layout in expected if layout not in counts]
        check(
            not missing,
            f"{here}: there are {counted(len(expected), 'valid layout')}; {len(missing)} of them "
            f"did not come, {missing[:1]} for one.",
        )


def _text(case: Case) -> str:
    model, machine, batch_size = case
    return (
        f"{counted(machine.nodes, 'node')} of {counted(machine.gpus_per_node, 'GPU')}, a batch of "
        f"{batch_size}, {model}"
    )


def _tight(grade: Grade) -> tuple[Case, list[Plan]]:
    """Return a case in which some layouts do not fit, and all its plans.

    All sizes are powers of two, so that memory needs are exact in any order of operations, and
    all correct answers agree on whether a plan exactly at the limit fits.
    """
    model = Transformer(grade.random.choice((8, 16)), 1024, 8, 512, 1024)
    machine = _machine(2, 4)._replace(network_bytes_per_s=grade.random.uniform(1e9, 9e9))
    plans = reference.plans(model, machine, 16)
    needs = sorted(plan.memory.total for plan in plans)
    place = grade.random.randrange(len(needs) // 4, len(needs) // 2)
    return (model, machine._replace(memory_bytes=needs[place]), 16), plans


@task("3.22")
def test_plans_are_all_that_fit(grade: Grade) -> None:
    (model, machine, batch_size), plans = _tight(grade)
    smallest = min(plan.memory.total for plan in plans)
    for limit in (machine.memory_bytes, smallest):
        limited = machine._replace(memory_bytes=limit)
        _check_those_that_fit(grade, (model, limited, batch_size), plans)


def _check_those_that_fit(grade: Grade, case: Case, plans: list[Plan]) -> None:
    limit, by_layout = case[1].memory_bytes, {plan.layout: plan for plan in plans}
    planned, calls = _plans(grade, case)
    for plan in planned:
        check(plan.layout in by_layout, f"{_text(case)}: {plan.layout} is not a valid layout.")
        known = by_layout[plan.layout]
        _check_estimate("estimate_memory", plan.layout, plan.memory, known.memory)
        _check_estimate("estimate_step_time", plan.layout, plan.time, known.time)
        check(
            known.memory.total <= limit,
            f"{plan.layout} is planned, but it needs {bytes_text(known.memory.total)}, and a GPU "
            f"has {bytes_text(limit)}. Is total, with all its parts, compared with memory_bytes?",
        )
    times = Counter(plan.layout for plan in planned)
    fit = [plan for plan in plans if plan.memory.total <= limit]
    missing = [(plan.layout, plan.memory.total) for plan in fit if plan.layout not in times]
    check(
        not missing,
        f"{len(fit)} of {counted(len(plans), 'layout')} fit, and all of them should be planned; "
        f"{len(missing)} are not, {missing[:1]} for one (with its bytes, of {limit:.0f}): a "
        "layout fits if it needs memory_bytes at most.",
    )
    again = [layout for layout, count in times.items() if count > 1]
    check(not again, f"each layout should be planned once; {again[:1]} came several times.")
    for name, most in (("estimate_memory", len(plans)), ("estimate_step_time", len(fit))):
        check_cost(
            calls[name] <= most,
            f"{_text(case)}: {len(plans)} layouts are valid and {len(fit)} of them fit. plan calls "
            f"{name} {calls[name]} times; {most} are enough. Keep what estimate_memory has "
            "returned, estimate the time only of layouts that fit, and sort by what is in the "
            "plans.",
        )


def _plans(grade: Grade, case: Case) -> tuple[list[Plan], dict[str, int]]:
    result = grade.call(b.plans_of, *case)
    rows = ((Layout(*x), Memory(*y), StepTime(*z)) for x, y, z in result["plans"])
    return [Plan(*row) for row in rows], result["calls"]


def _check_estimate(name: str, layout: Layout, mine: Any, right: Any) -> None:
    pairs = zip(right._fields, mine, right, strict=True)
    differ = [part for part, x, y in pairs if abs(x - y) > EXACT * abs(y) + 1e-12]
    check(
        not differ,
        f"the plan of {layout} should hold what {name} returns; its part {differ[:1]} differs. Is "
        f"{name} right by its own tests, and is it called with the batch size?",
    )


@task("3.22")
def test_the_fastest_comes_first(grade: Grade) -> None:
    case, plans = _tight(grade)
    fit = [plan for plan in plans if plan.memory.total <= case[1].memory_bytes]
    best = min(fit, key=lambda plan: plan.time.total)
    by_layout = {plan.layout: plan for plan in plans}
    planned = [
        by_layout[plan.layout] for plan in _plans(grade, case)[0] if plan.layout in by_layout
    ]
    check(bool(planned), f"{_text(case)}: no plan came, but {len(fit)} layouts fit.")
    for before, after in [(planned[0], best), *pairwise(planned)]:
        check(
            before.time.total <= after.time.total * (1 + EXACT),
            f"the fastest plans should come first: {before.layout} comes before {after.layout}, "
            f"but takes {seconds_text(before.time.total)}, not {seconds_text(after.time.total)}. "
            "Is total what decides?",
        )


@task("3.22")
def test_what_cannot_fit_is_refused(grade: Grade) -> None:
    machine, batch_size = _machine(2, 4), 8
    vocabulary = 50000 + grade.random.randrange(2000)
    model = Transformer(12, 12288, 96, 2048, vocabulary)
    wide, long = model._replace(width=96 * 400), model._replace(width=768, heads=12, length=30000)
    for refused in (model, wide, long, long._replace(length=5000)):
        smallest = min(plan.memory.total for plan in reference.plans(refused, machine, batch_size))
        too_small = machine._replace(memory_bytes=smallest * grade.random.uniform(0.5, 0.99))
        need = f"{smallest / 1e9:.1f}"
        here = (
            f"{refused} needs {need} GB (10⁹ bytes) at least, in the layout with the smallest "
            f"total; on GPUs of {too_small.memory_bytes / 1e9:.2f} GB: that"
        )
        check_refused([grade.call(b.refusal_of_plan, refused, too_small, batch_size)], here, need)
    here = f"{machine.gpus} GPUs with a batch of 7 and a model of 5 layers and 7 heads: that"
    odd = model._replace(layers=5, heads=7, width=7 * 64)
    refusal = grade.call(b.refusal_of_plan, odd, machine, 7)
    check_refused([refusal], here, str(machine.gpus), "7")
