"""Judges tasks 2.9 to 2.11: schedules, and a program that runs any schedule."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from distlab.grade import Grade, Run, Wrong, check, check_cost, task
from distlab.sim import Options
from distlab.util.text import clauses, counted, joined
from judging.calls import refused
from judging.checks import (
    MEASURED,
    check_refused,
    check_silent,
    check_waited,
    edges_with,
    is_close,
    short,
)
from judging.expect import expect, expect_cost, results_in_group
from phase2 import drawings as d
from phase2 import pipelines as b
from phase2.pipelines import KINDS, WIDTH, alone
from phase2_advanced.given import Action, Schedule

GPIPE = {(3, 4): d.GPIPE_3_4, (4, 2): d.GPIPE_4_2}  # (stages, micro-batches): drawing
ONE_F_ONE_B = {(3, 4): d.ONE_F_ONE_B_3_4, (4, 8): d.ONE_F_ONE_B_4_8, (4, 2): d.ONE_F_ONE_B_4_2}
FORWARD_FIRST = (
    "All forward passes come first, from micro-batch 0 on; the backward passes begin with the last "
    "micro-batch."
)
DIFFER = "Where do they differ first, and which stage waits there?"
SIZES = [(3, 4), (4, 2), (4, 8), (2, 3), (5, 3), (8, 8), (1, 4), (1, 1), (6, 30)]
INTERLEAVED = [  # stages, micro-batches, chunks
    *[(4, 8, 2), (2, 4, 2), (3, 6, 3), (4, 4, 3)],
    *[(2, 2, 2), (2, 6, 1), (1, 3, 2), (2, 30, 2)],
]


def _schedules(
    grade: Grade, function: str, drawings: Mapping[tuple[int, int], str], cause: str
) -> Iterator[tuple[int, int, Schedule, str]]:
    """Check the learner's schedule for each size; yield the size, the schedule, and a description.

    The size is a number of stages and a number of micro-batches.
    """
    sizes = [*SIZES, (grade.random.randint(2, 6), grade.random.randint(2, 12))]
    for (p, m), schedule in zip(sizes, _called(grade, function, sizes), strict=True):
        here = d.size_text(p, m)
        _check_actions(here, schedule, p, m)
        if (p, m) in drawings:
            check(
                schedule == d.drawn(drawings[p, m]),
                f"{here}: expected was\n    "
                + d.redrawn(drawings[p, m]).replace("\n", "\n    ")
                + f"\nbut it is{d.picture(schedule)}\n{cause}",
            )
        yield p, m, schedule, here


def _called(grade: Grade, function: str, sizes: Sequence[tuple[int, ...]]) -> list[Schedule]:
    found = grade.call(b.rows_of_each, function, [list(size) for size in sizes])
    return [[[Action(*action) for action in row] for row in rows] for rows in found]


def _check_actions(here: str, schedule: Schedule, p: int, m: int, v: int = 1) -> None:
    """Check that each stage does each of its actions once, and that the schedule can be run."""
    check(
        len(schedule) == p,
        f"{here}: {counted(p, 'list')}, one for each stage, should come; {len(schedule)} came.",
    )
    passes = [(i, chunk) for i in range(m) for chunk in range(v)]
    wanted = Counter(Action(kind, *one) for kind in "FB" for one in passes)
    for stage, actions in enumerate(schedule):
        missing, extra = wanted - Counter(actions), Counter(actions) - wanted
        check(
            not missing and not extra,
            f"{here}: stage {stage} should do each of its {len(wanted)} actions once. "
            f"{_difference(missing, extra)}.{d.picture(schedule)}",
        )
    check(
        len(d.timeline(schedule)) == 4 * p * m * v,
        f"{here}: this schedule comes to a stop. {d.why_stopped(schedule)}{d.picture(schedule)}",
    )


def _difference(missing: Counter[Action], extra: Counter[Action]) -> str:
    lacks = [f"lacks {_some(missing)}"] if missing else []
    has = [f"has {_some(extra)} too often"] if extra else []
    return f"It {clauses([*lacks, *has])}"


def _some(actions: Counter[Action]) -> str:
    first, others = [str(action) for action in list(actions)[:4]], len(actions) - 4
    return joined(first) if others <= 0 else f"{', '.join(first)} and {others} more"


def _check_length(here: str, schedule: Schedule, expected: int, cause: str) -> None:
    """Check that a schedule takes no longer than ``expected`` forward and backward passes."""
    for backward_time in (1, 2):
        unit = 1 + backward_time
        found = d.length(schedule, backward_time) / unit
        takes = "twice as long" if backward_time == 2 else "as long"
        check(
            found <= expected,
            f"{here}: if a backward pass takes {takes} as a forward pass, "
            f"the step should take as long as {expected} forward and {expected} backward passes; "
            f"it takes as long as {found:g}. {cause}{d.picture(schedule)}",
        )


def _check_in_flight(here: str, schedule: Schedule, most: list[int], cause: str) -> None:
    for stage, actions in enumerate(schedule):
        found = d.in_flight(actions)
        check(
            found <= most[stage],
            f"{here}: at most {most[stage]} may be in flight in stage {stage}, but {found} are, "
            f"and each of them holds its activations. {cause}{d.picture(schedule)}",
        )


@task("2.9")
def test_gpipe_of_any_size(grade: Grade) -> None:
    for _, m, schedule, here in _schedules(grade, "gpipe_schedule", GPIPE, FORWARD_FIRST):
        forward, backward = ([Action(kind, i) for i in range(m)] for kind in "FB")
        for stage, actions in enumerate(schedule):
            check(
                actions == [*forward, *reversed(backward)],
                f"{here}: stage {stage} does its actions in another order. {FORWARD_FIRST}"
                f"{d.picture(schedule)}",
            )


@task("2.9")
def test_1f1b_holds_few_micro_batches(grade: Grade) -> None:
    for p, _, schedule, here in _schedules(grade, "one_f_one_b_schedule", {}, ""):
        _check_in_flight(
            *(here, schedule, [p - stage for stage in range(p)]),
            "The last stage can go backward right after each forward pass, and every stage before "
            "it needs one more forward pass ahead.",
        )


@task("2.9")
def test_1f1b_takes_no_longer_than_gpipe(grade: Grade) -> None:
    """Each drawing shows the only order that achieves both its memory use and its length."""
    for p, m, schedule, here in _schedules(grade, "one_f_one_b_schedule", ONE_F_ONE_B, DIFFER):
        for stage, actions in enumerate(schedule):
            for kind, name in (("F", "forward"), ("B", "backward")):
                order = [action.micro_batch for action in actions if action.kind == kind]
                what = f"{here}: the order of micro-batches that go {name} in stage {stage}"
                expect(what, order, [*range(m)], d.picture(schedule))
        _check_length(
            *(here, schedule, m + p - 1),
            "Does each stage have enough forward passes ahead when it begins to take turns?",
        )


def _interleaved(grade: Grade) -> Iterator[tuple[int, int, int, Schedule, str]]:
    """Check the learner's schedule for each size; yield the size, the schedule, and a description.

    The size is a number of stages, of micro-batches, and of chunks per stage.
    """
    p = grade.random.randint(2, 5)
    drawn = p, p * grade.random.randint(1, 3), grade.random.randint(2, 4)
    sizes = [*INTERLEAVED, drawn]
    for size, schedule in zip(sizes, _called(grade, "interleaved_schedule", sizes), strict=True):
        here = d.size_text(*size[:2]) + f", {counted(size[2], 'chunk')} on each stage"
        _check_actions(here, schedule, *size)
        yield *size, schedule, here


@task("2.11")
def test_interleaving_divides_the_bubble(grade: Grade) -> None:
    for p, m, v, schedule, here in _interleaved(grade):
        _check_length(
            *(here, schedule, v * m + p - 1),
            f"1F1B takes {v * (m + p - 1)} such passes through one chunk: its bubble is {v} times "
            "as long. Do p micro-batches go through a chunk before they begin the next, and has "
            "each stage enough forward passes ahead?",
        )


@task("2.11")
def test_interleaving_holds_no_more_than_it_needs(grade: Grade) -> None:
    for p, _, v, schedule, here in _interleaved(grade):
        most = [(v - 1) * p + 2 * (p - 1 - stage) + 1 for stage in range(p)]
        _check_in_flight(
            *(here, schedule, most),
            "How many forward passes has the last stage done when micro-batch 0 leaves the last "
            "block? Two more for every stage before it are enough.",
        )


@task("2.11")
def test_interleaving_refuses_a_remainder(grade: Grade) -> None:
    for p, m in ((2, 3), (4, 6), (grade.random.randint(3, 7), 1)):
        refusal = grade.call(refused, "interleaved_schedule", p, m, 2)
        check_refused([refusal], f"m = {m}, which is not a multiple of p = {p},", str(m), str(p))


STUCK = (
    "Both ranks of a message must come to it at the same point of one order that all ranks know. A "
    "rank that first sends what it has while its neighbour does the same waits forever."
)
ROUNDING = 2.0**-7  # relative error after two roundings to bfloat16's 8 bits
Result = dict[str, Any]


def _sizes(grade: Grade, m: int) -> list[int]:
    """Draw the number of rows in each of m micro-batches, all of them different."""
    return grade.random.sample(range(3, 3 + 3 * m), m)


def _pipelines(
    grade: Grade,
    *schedules: Schedule,
    kinds: Sequence[str] = ("dense",),
    options: Options | None = None,
) -> tuple[Run, list[list[int]]]:
    """Run each schedule with each kind of model on the same ranks; check loss and gradients."""
    p, cases = len(schedules[0]), []
    for schedule in schedules:
        for kind in kinds:
            m = len(schedule[0]) // (2 * _chunks(schedule))
            cases.append((d.written(schedule), _sizes(grade, m), kind))
    run = grade.run(b.run_pipelines, p, cases, options=options, if_stuck=STUCK)
    _check_cases(run.results, cases)
    return run, [sizes for _, sizes, _ in cases]


def _chunks(schedule: Schedule) -> int:
    return 1 + max(action.chunk for action in schedule[0])


def _check_cases(by_rank: Sequence[Sequence[Result]], cases: Sequence[b.Case]) -> None:
    for number, (text, sizes, kind) in enumerate(cases):
        schedule = d.drawn(text)
        p, expected = len(schedule), alone(_chunks(schedule) * len(schedule), sizes, kind)
        for rank, result in enumerate(results[number] for results in by_rank):
            here = f"a {kind} model, micro-batches of {[*sizes]} rows, rank {rank} of {p}"
            _check_loss(here, result["loss"], expected)
            for chunk, gradients in enumerate(result["gradients"]):
                block = chunk * p + rank
                _check_gradients(f"{here}, block {block}", gradients, block, expected, text, kind)
            loss = by_rank[0][number]["loss"]
            expect(f"{here}: the loss, exactly as on rank 0,", result["loss"], loss)
            expect_cost(
                f"{here}: the number of calls of loss_sum in {b.CALLS} calls",
                result["losses"],
                b.CALLS * len(sizes) if rank == p - 1 else 0,
                "Call it once for each micro-batch and only on the rank of the last block.",
            )


def _check_loss(here: str, found: float, expected: Result) -> None:
    causes = {
        "mean of means": "That is the mean of the micro-batches' means, in which the small ones "
        "count too much. Add up the sums of the losses and the targets of all micro-batches, and "
        "divide once.",
        "last": "That is the loss of the last micro-batch alone.",
    }
    known = [cause for name, cause in causes.items() if is_close(expected[name], found)]
    what = f"the mean loss over all {expected['targets']} targets"
    expect(f"{here}: {what}", found, expected["loss"], "".join(known[:1]), 1e-9)


def _check_gradients(
    here: str, found: dict[str, Any], block: int, expected: Result, text: str, kind: str
) -> None:
    means, picture = expected["gradients of means"][block], d.picture(d.drawn(text))
    for name, wanted in expected["gradients"][block].items():
        got = found[name]
        if wanted is None and kind == "detached" and not any(got or []):
            continue  # the loss does not depend on this parameter, so zeros and None are both right
        check(
            (wanted is None) == (got is None),
            f"{here}: {name} should have {'no' if wanted is None else 'a'} gradient, as in one "
            f"process, but has {'none' if got is None else 'one'}. Gradients from before the call "
            f"do not count, nor do those of frozen parameters.{picture}",
        )
        if wanted is not None and not is_close(wanted, got, _tolerance(wanted, kind)):
            cause = _cause(wanted, got, means[name], expected["targets"])
            raise Wrong(
                f"{here}: the gradient of {name} is {short(got)}; in one process it is "
                f"{short(wanted)}. {cause}{picture}"
            )


def _tolerance(wanted: Any, kind: str) -> float:
    """Return how far rounding may move a gradient from the expected one."""
    largest = float(torch.tensor(wanted).abs().max())
    return max(0.05, ROUNDING * largest) if kind == "bfloat16" else 1e-9


def _cause(wanted: list[float], got: list[float], means: list[float], num_targets: int) -> str:
    """Return the likely cause of a wrong gradient, given the gradient of the mean of means."""
    factor = _factor(wanted, got)
    if factor is None and _factor(means, got):
        return (
            "That is the mean of the micro-batches' means, or a multiple of it: the targets of a "
            "micro-batch with few of them weigh too much. Add up sums, and divide once, by all "
            "targets."
        )
    if factor is None:
        return (
            "Does every micro-batch reach every block once, forward and backward, with its own "
            "inputs and its own gradient?"
        )
    if abs(factor - num_targets) < 1e-6:
        return "That is the gradient of the sum of the losses: divide by the number of targets."
    return (
        f"It is {factor:.4g} times as large on this rank. Either a target does not weigh 1/T in "
        "it, or gradients from before the call were not cleared."
    )


def _factor(one: list[float], other: list[float]) -> float | None:
    """Return the factor that turns ``one`` into ``other``, or None if there is no such factor."""
    largest = max(range(len(one)), key=lambda i: abs(one[i]))
    factor = other[largest] / one[largest] if one[largest] else 0.0
    is_multiple = is_close([factor * x for x in one], other, 1e-9 * max(1.0, abs(factor)))
    return factor if is_multiple else None


# Results


@task("2.10", real=True)
def test_gradients_are_those_of_one_process(grade: Grade) -> None:
    forwards, backwards = ([Action(kind, i) for i in range(4)] for kind in "FB")
    run, _ = _pipelines(grade, [forwards + backwards for _ in range(3)])
    if grade.is_simulated:
        check_waited(run)


@task("2.10")
@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (5, 2, 2), (8, 3, 1)])
def test_any_schedule_that_can_be_run_is_run(grade: Grade, p: int, m: int, v: int) -> None:
    _pipelines(grade, d.shuffled(grade.random, p, m, v))


@task("2.10")
def test_models_of_many_kinds(grade: Grade) -> None:
    _pipelines(grade, d.drawn(d.ONE_F_ONE_B_3_4), kinds=KINDS[1:])


@task("2.10")
def test_a_pipeline_inside_a_group(grade: Grade) -> None:
    cases = [(d.written(d.drawn(d.ONE_F_ONE_B_3_4)), _sizes(grade, 4), "dense")]
    _check_cases(results_in_group(grade, b.run_pipelines, cases), cases)


# Order, messages


@task("2.10", part="b")
@pytest.mark.parametrize("p", [2, 3])
def test_messages_may_go_one_after_the_other(grade: Grade, p: int) -> None:
    drawings = (d.INTERLEAVED_2_4_2,) if p == 2 else (d.GPIPE_3_4, d.ONE_F_ONE_B_3_4)
    by_chance = d.shuffled(grade.random, p, 4, 2)
    _pipelines(grade, *map(d.drawn, drawings), by_chance, options=Options(p2p_order="pair"))


SENT = {
    "1F1B": (d.ONE_F_ONE_B_3_4, "dense"),
    "chunks": (d.INTERLEAVED_2_4_2, "dense"),
    "frozen": (d.ONE_F_ONE_B_3_4, "frozen"),
    "16 bits": (d.ONE_F_ONE_B_3_4, "bfloat16"),
}


@task("2.10", part="b")
@pytest.mark.parametrize("name", SENT)
def test_each_output_and_each_gradient_is_sent_once(grade: Grade, name: str) -> None:
    text, kind = SENT[name]
    schedule = d.drawn(text)
    run, (sizes,) = _pipelines(grade, schedule, kinds=(kind,))
    p, num_blocks = len(schedule), len(schedule) * _chunks(schedule)
    links = [(block % p, (block + 1) % p) for block in range(num_blocks - 1)]
    # In a frozen model, only the last block is trained, so no gradients are sent back.
    back = [link[::-1] for link in links if kind != "frozen"]
    expected = {link: b.CALLS * count for link, count in Counter([*links, *back]).items()}
    num_bytes = [(2 if kind == "bfloat16" else 8) * rows * 2 * WIDTH for rows in sizes]
    for size in num_bytes:
        expect_cost(
            f"a {kind} model, a micro-batch of {size:,} bytes between blocks, {b.CALLS} calls: the "
            "numbers of messages of that size, by (from, to),",
            sorted(edges_with(run, size).items()),
            sorted(expected.items()),
            "Send each output and each gradient once, and no gradient for an output that requires "
            "none.",
        )
    expect_cost(
        f"the numbers of collectives in {b.CALLS} calls",
        run.collectives,
        [b.CALLS] * p,
        "The last rank knows loss and number of targets: one broadcast in each call is enough.",
    )
    data = b.CALLS * 2 * len(links) * sum(num_bytes)
    most = data + b.CALLS * (2 * len(links) * len(num_bytes) * 1000 + 1000)
    check_cost(
        sum(run.bytes_sent) <= most,
        f"outputs and gradients are {data:,} bytes in all, and {most:,} with their headers; your "
        f"ranks sent {sum(run.bytes_sent):,.0f}.",
    )


IDEAL = {
    "GPipe": (d.GPIPE_4_2, 2, 1),
    "1F1B": (d.ONE_F_ONE_B_4_8, 8, 1),
    "interleaved 1F1B": (d.INTERLEAVED_2_4_2, 4, 2),
    "a schedule in another order": (d.ANY_ORDER_2_4, 4, 1),
}


@task("2.10", part="b")
@pytest.mark.parametrize("name", IDEAL)
def test_time_and_memory_are_those_of_the_schedule(grade: Grade, name: str) -> None:
    text, m, v = IDEAL[name]
    schedule = d.drawn(text)
    p = len(schedule)
    here = f"{name}, {d.size_text(p, m)}"
    run = grade.run(
        *(b.run_ideal, p, d.written(schedule), m, v), cluster=b.ideal(p), if_stuck=STUCK
    )
    for rank, peaks in enumerate(run.trace.peak_by_category if run.trace else []):
        found, most = peaks["activations"] / b.BLOCK_BYTES, d.in_flight(schedule[rank])
        check_cost(
            found <= most + 0.6,
            f"{here}: at most {most} are in flight in stage {rank}, but it held the activations of "
            f"{found:.1f}. Do the actions in the order of the schedule, and keep nothing of a "
            "micro-batch after its backward pass: no output, no loss with its graph."
            f"{d.picture(schedule)}",
        )
    length, busy = d.length(schedule, 2), 3 * m * v
    found = run.seconds * b.FLOPS_PER_S / b.BLOCK_FLOPS  # in forward passes through a block
    check_cost(
        found <= length * (1 + 1e-6),
        f"{here}: each stage should stand still for {1 - busy / length:.1%} of the time, as in "
        f"timeline; yours do for {1 - busy / found:.1%}. Does a rank wait for a message that it "
        "does not need yet, or for its own message to be received?",
    )


@task("2.10", part="b")
def test_nothing_is_kept_of_a_micro_batch_that_is_done(grade: Grade) -> None:
    few, many = 2, 6
    two, six = (
        grade.run(b.run_one_at_a_time, 3, m, options=MEASURED, if_stuck=STUCK) for m in (few, many)
    )
    for rank, (fewer, more) in enumerate(zip(two.peak_bytes, six.peak_bytes, strict=True)):
        check_cost(
            more < fewer + b.KEPT_BYTES,
            f"rank {rank} of 3, all of which run F0 B0 F1 B1 and so on, held at most {fewer:,} "
            f"bytes with {few} micro-batches and {more:,} with {many}; an output or a gradient "
            f"takes {b.KEPT_BYTES:,}. Keep nothing of a micro-batch after its backward "
            "pass, except for the last message to each neighbour: no input, no output, no "
            "gradient, and no loss with its graph, which holds the input of the last block.",
        )


# Refusals

GOOD = "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"  # 3 micro-batches on 2 stages
BROKEN = [  # defect, a schedule with it, and the actions that an error should name
    ("B0 before F0 in stage 1", f"{GOOD[0]}\nB0 F0 F1 B1 F2 B2", "B0"),
    ("B2 before F2 in stage 0", f"F0 F1 B0 B2 B1 F2\n{GOOD[1]}", "B2 F2"),
    ("a circle of waiting stages", "F0 B0 F1 F2 B1 B2\nF1 F0 B0 B1 F2 B2", "B0 F1"),
    ("F1 twice in stage 0", f"F0 F1 B0 F1 F2 B1 B2\n{GOOD[1]}", "F1"),
    ("B2 twice in stage 1", f"{GOOD[0]}\nF0 B0 F1 B1 F2 B2 B2", "B2"),
    ("no micro-batch 2 in stage 1", f"{GOOD[0]}\nF0 B0 F1 B1", "F2 B2"),
    ("no micro-batch 2", "F0 F1 B0 B1\nF0 B0 F1 B1", "F2 B2"),
    ("no B1 in stage 0", f"F0 F1 B0 F2 B2\n{GOOD[1]}", "B1"),
    ("a micro-batch 3", f"{GOOD[0]} F3 B3\n{GOOD[1]} F3 B3", "F3 B3"),
    ("a second chunk in stage 0", f"{GOOD[0]} F0.1 B0.1\n{GOOD[1]}", "F0.1 B0.1"),
]
# Schedules for more or fewer stages than there are ranks, by number of stages.
OTHERS = {
    3: f"{GOOD[0]}\n{GOOD[0]}\n{GOOD[1]}",
    1: GOOD[1],
}
UNCHECKED = (
    "The schedule cannot be run, or is not that of all micro-batches. Every rank has the whole "
    "schedule, and can refuse it before it sends anything."
)


@task("2.10", part="c")
def test_what_is_no_schedule_is_refused(grade: Grade) -> None:
    texts = [*(text for _, text, _ in BROKEN), *OTHERS.values()]
    run = grade.run(b.refusals, 2, texts, 3, if_stuck=UNCHECKED)
    by_text = [list(refusals) for refusals in zip(*run.results, strict=True)]
    for (wrong, text, names), refusals in zip(BROKEN, by_text, strict=False):
        what = f"{wrong}, of 3 micro-batches on 2 stages:{d.picture(d.drawn(text))}\nThis"
        check_refused(refusals, what, text="same")
        said = refusals[0]["text"].partition("\n")[0]
        check(
            {*re.findall(r"\b[FB]\d+(?:\.\d+)?", said)} & {*names.split(), *_never_started(text)},
            f"{what} should be refused with an error that names {names.replace(' ', ' or ')}; it "
            f"says {short(said)}.",
        )
    for num_stages, refusals in zip(OTHERS, by_text[len(BROKEN) :], strict=True):
        what = f"A schedule of {counted(num_stages, 'stage')} on 2 ranks"
        check_refused(refusals, what, str(num_stages), "2", text="same")
    check_silent(run, "What is refused")


def _never_started(text: str) -> set[str]:
    """Return the names of all actions that can never start; an error may name any of them."""
    schedule = d.drawn(text)
    started = {(event.stage, event.action) for event in d.timeline(schedule)}
    every = {(stage, action) for stage, actions in enumerate(schedule) for action in actions}
    return {str(action) for _, action in every - started}
