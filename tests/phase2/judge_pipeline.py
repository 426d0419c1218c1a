"""Judges task 2.12: a program that runs any schedule: results, messages, memory, time, refusals."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, Wrong, check, task
from distlab.sim import Options
from distlab.util.text import counted
from judging.checks import (
    MEASURED,
    check_refused,
    check_silent,
    check_waited,
    distance,
    edges_with,
    of_members,
    short,
)
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase2 import drawings as d
from phase2 import pipelines as b
from phase2.pipelines import KINDS, WIDTH, alone
from phase2_advanced.given import Action, Schedule

STUCK = (
    "Both ranks of a message must come to it at the same point of one order that all ranks know. A "
    "rank that first sends what it has while its neighbour does the same waits forever."
)
TOLERANCES = {"bfloat16": 0.05}  # gradients rounded to 16 bits
Result = dict[str, Any]


def _sizes(grade: Grade, m: int) -> list[int]:
    """Rows of m micro-batches, all different."""
    return grade.random.sample(range(3, 3 + 3 * m), m)


def _pipelines(
    grade: Grade,
    *schedules: Schedule,
    kinds: Sequence[str] = ("dense",),
    options: Options | None = None,
) -> tuple[Run, list[list[int]]]:
    """Run schedules for the same ranks, each with each kind of model; check loss and gradients."""
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
        _check_results([results[number] for results in by_rank], d.drawn(text), sizes, kind)


def _check_results(
    results: Sequence[Result], schedule: Schedule, sizes: Sequence[int], kind: str
) -> None:
    p = len(schedule)
    expected = alone(_chunks(schedule) * p, sizes, kind)
    for rank, result in enumerate(results):
        here = f"a {kind} model, micro-batches of {list(sizes)} rows, rank {rank} of {p}"
        _check_loss(here, result["loss"], expected)
        for chunk, gradients in enumerate(result["gradients"]):
            block = chunk * p + rank
            _check_gradients(f"{here}, block {block}", gradients, block, expected, schedule, kind)
        check(
            result["loss"] == results[0]["loss"],
            f"{here}: the mean loss is {result['loss']!r}, but {results[0]['loss']!r} on rank 0. "
            "All ranks should return the same number.",
        )
        calls = b.CALLS * len(sizes) if rank == p - 1 else 0
        check(
            result["losses"] == calls,
            f"{here}: in {b.CALLS} calls, loss_sum should be called {calls} times, once for each "
            "micro-batch and only on the rank of the last block; it was called "
            f"{result['losses']} times.",
        )


def _check_loss(here: str, found: float, expected: Result) -> None:
    causes = {
        "mean of means": "That is the mean of the micro-batches' means, in which the small ones "
        "count too much. Add up the sums of the losses and the targets of all micro-batches, and "
        "divide once.",
        "last": "That is the loss of the last micro-batch alone.",
    }
    said = [cause for name, cause in causes.items() if distance(expected[name], found) <= 1e-9]
    check(
        distance(expected["loss"], found) <= 1e-9,
        f"{here}: the mean loss over all {expected['targets']} targets is {expected['loss']:.6f}; "
        f"run_schedule returned {found:.6f}. {''.join(said[:1])}",
    )


def _check_gradients(
    here: str,
    found: dict[str, Any],
    block: int,
    expected: Result,
    schedule: Schedule,
    kind: str,
) -> None:
    means = expected["gradients of means"][block]
    for name, wanted in expected["gradients"][block].items():
        got = found[name]
        if wanted is None and kind == "detached" and not any(got or []):
            continue  # the loss does not depend on it: zeros or none
        check(
            (wanted is None) == (got is None),
            f"{here}: {name} should have {'no' if wanted is None else 'a'} gradient, as in one "
            f"process, but has {'none' if got is None else 'one'}. Gradients from before the call "
            f"do not count, nor do those of frozen parameters.{d.picture(schedule)}",
        )
        if wanted is not None and distance(wanted, got) > TOLERANCES.get(kind, 1e-9):
            raise Wrong(
                f"{here}: the gradient of {name} is {short(got)}; in one process it is "
                f"{short(wanted)}. {_cause(wanted, got, means[name], expected)}"
                f"{d.picture(schedule)}"
            )


def _cause(wanted: list[float], got: list[float], means: list[float], expected: Result) -> str:
    """What it tells if the gradient is a multiple of the right one, or of the mean of means."""
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
    if abs(factor - expected["targets"]) < 1e-6:
        return "That is the gradient of the sum of the losses: divide by the number of targets."
    if abs(factor - b.CALLS) < 1e-6:
        return "That is the sum of two calls: gradients from before the call do not count."
    return (
        f"It is {factor:.4g} times as large on this rank. Either a target does not weigh 1/T in "
        "it, or gradients from before the call were not cleared."
    )


def _factor(one: list[float], other: list[float]) -> float | None:
    """By which number ``one`` is to be multiplied to get ``other``; None if by none."""
    largest = max(range(len(one)), key=lambda i: abs(one[i]))
    factor = other[largest] / one[largest] if one[largest] else 0.0
    is_multiple = distance([factor * x for x in one], other) <= 1e-9 * max(1.0, abs(factor))
    return factor if is_multiple else None


# Results


@task("2.12", real=True)
def test_gradients_are_those_of_one_process(grade: Grade) -> None:
    forwards, backwards = ([Action(kind, i) for i in range(4)] for kind in "FB")
    run, _ = _pipelines(grade, [forwards + backwards for _ in range(3)])
    if grade.is_simulated:
        check_waited(run)


@task("2.12")
@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (5, 2, 2), (8, 3, 1)])
def test_any_schedule_that_can_be_run_is_run(grade: Grade, p: int, m: int, v: int) -> None:
    _pipelines(grade, d.shuffled(grade.random, p, m, v))


@task("2.12")
def test_models_of_many_kinds(grade: Grade) -> None:
    _pipelines(grade, d.drawn(d.ONE_F_ONE_B_3_4), kinds=KINDS[1:])


@task("2.12")
def test_a_pipeline_inside_a_group(grade: Grade) -> None:
    cases = [(d.written(d.drawn(d.ONE_F_ONE_B_3_4)), _sizes(grade, 4), "dense")]
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.run_pipelines, cases), if_stuck=STUCK_IN_GROUP
    )
    _check_cases(of_members(run), cases)


# Order, messages


@task("2.12")
@pytest.mark.parametrize("p", [2, 3])
def test_messages_may_go_one_after_the_other(grade: Grade, p: int) -> None:
    drawings = (d.INTERLEAVED_2_4_2,) if p == 2 else (d.GPIPE_3_4, d.ONE_F_ONE_B_3_4)
    by_chance = d.shuffled(grade.random, p, 4, 2)
    _pipelines(grade, *map(d.drawn, drawings), by_chance, options=Options(p2p_order="pair"))


@task("2.12")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (d.ONE_F_ONE_B_3_4, "dense"),
        (d.INTERLEAVED_2_4_2, "dense"),
        (d.ONE_F_ONE_B_3_4, "frozen"),
        (d.ONE_F_ONE_B_3_4, "bfloat16"),
    ],
    ids=["1F1B", "chunks", "frozen", "16 bits"],
)
def test_each_output_and_each_gradient_is_sent_once(grade: Grade, text: str, kind: str) -> None:
    schedule = d.drawn(text)
    run, (sizes,) = _pipelines(grade, schedule, kinds=(kind,))
    p, num_blocks = len(schedule), len(schedule) * _chunks(schedule)
    links = [(block % p, (block + 1) % p) for block in range(num_blocks - 1)]
    gradients = [
        link[::-1] for link in links if kind != "frozen"
    ]  # there, only the last block learns
    expected = Counter([*links, *gradients])
    for rows in sizes:
        found = edges_with(run, num_bytes := _bytes_of(rows, kind))
        for link in sorted({*expected, *found}):
            wanted, got = b.CALLS * expected[link], found.get(link, 0)
            check(
                got == wanted,
                f"a {kind} model: a micro-batch of {rows} rows is {num_bytes:,} bytes between "
                f"blocks. In {b.CALLS} calls, rank {link[0]} should send rank {link[1]} "
                f"{counted(wanted, 'message')} of that size, each output and each gradient once, "
                f"and no gradient for an output that requires none; it sent {got}.",
            )
    _check_nothing_else(run, links, [_bytes_of(rows, kind) for rows in sizes])


def _bytes_of(rows: int, kind: str) -> int:
    """Bytes of a micro-batch between blocks."""
    return (2 if kind == "bfloat16" else 8) * rows * 2 * WIDTH


def _check_nothing_else(run: Run, links: list[tuple[int, int]], num_bytes: Sequence[int]) -> None:
    check(
        run.collectives == [b.CALLS] * len(run.results),
        "one broadcast in each call is enough: the last rank knows loss and number of targets. In "
        f"{b.CALLS} calls, the numbers of collectives by rank are {run.collectives}.",
    )
    data = b.CALLS * 2 * len(links) * sum(num_bytes)
    most = data + b.CALLS * (2 * len(links) * len(num_bytes) * 1000 + 1000)
    check(
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


@task("2.12")
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
        check(
            found <= most + 0.6,
            f"{here}: at most {most} are in flight in stage {rank}, but it held the activations of "
            f"{found:.1f}. Do the actions in the order of the schedule, and keep nothing of a "
            "micro-batch after its backward pass: no output, no loss with its graph."
            f"{d.picture(schedule)}",
        )
    _check_bubble(here, run.seconds, d.length(schedule, 2), 3 * m * v)


def _check_bubble(here: str, seconds: float, length: int, busy: int) -> None:
    """Check how long it took, with a forward pass through a block as the unit."""
    found = seconds * b.FLOPS_PER_S / b.BLOCK_FLOPS
    check(
        found <= length * (1 + 1e-6),
        f"{here}: each stage should stand still for {1 - busy / length:.1%} of the time, as in "
        f"timeline; yours do for {1 - busy / found:.1%}. Does a rank wait for a message that it "
        "does not need yet, or for its own message to be received?",
    )


@task("2.12")
def test_nothing_is_kept_of_a_micro_batch_that_is_done(grade: Grade) -> None:
    few, many = 2, 6
    two, six = (
        grade.run(b.run_one_at_a_time, 3, m, options=MEASURED, if_stuck=STUCK) for m in (few, many)
    )
    for rank, (fewer, more) in enumerate(zip(two.peak_bytes, six.peak_bytes, strict=True)):
        check(
            more < fewer + b.KEPT_BYTES,
            f"rank {rank} of 3, all of which run F0 B0 F1 B1 and so on, held at most {fewer:,} "
            f"bytes with {few} micro-batches and {more:,} with {many}; an output or a gradient "
            f"takes {b.KEPT_BYTES:,}. Keep nothing of a micro-batch after its backward "
            "pass, except for the last message to each neighbour: no input, no output, no "
            "gradient, and no loss with its graph, which holds the input of the last block.",
        )


# Refusals


GOOD = "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"  # 3 micro-batches on 2 stages
BROKEN = {  # what is wrong, a schedule with it, and which actions the error had best name
    "order": [
        ("B0 before F0 in stage 1", f"{GOOD[0]}\nB0 F0 F1 B1 F2 B2", "B0"),
        ("B2 before F2 in stage 0", f"F0 F1 B0 B2 B1 F2\n{GOOD[1]}", "B2 F2"),
        ("a circle of waiting stages", "F0 B0 F1 F2 B1 B2\nF1 F0 B0 B1 F2 B2", "B0 F1"),
    ],
    "number": [
        ("F1 twice in stage 0", f"F0 F1 B0 F1 F2 B1 B2\n{GOOD[1]}", "F1"),
        ("B2 twice in stage 1", f"{GOOD[0]}\nF0 B0 F1 B1 F2 B2 B2", "B2"),
        ("no micro-batch 2 in stage 1", f"{GOOD[0]}\nF0 B0 F1 B1", "F2 B2"),
        ("no micro-batch 2", "F0 F1 B0 B1\nF0 B0 F1 B1", "F2 B2"),
        ("no B1 in stage 0", f"F0 F1 B0 F2 B2\n{GOOD[1]}", "B1"),
        ("a micro-batch 3", f"{GOOD[0]} F3 B3\n{GOOD[1]} F3 B3", "F3 B3"),
        ("a second chunk in stage 0", f"{GOOD[0]} F0.1 B0.1\n{GOOD[1]}", "F0.1 B0.1"),
    ],
}


@task("2.12")
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_schedule_is_refused(grade: Grade, kind: str) -> None:
    texts = [text for _, text, _ in BROKEN[kind]]
    run = grade.run(b.refusals, 2, texts, 3, if_stuck=UNCHECKED)
    for number, (wrong, text, names) in enumerate(BROKEN[kind]):
        what = f"{wrong}, of 3 micro-batches on 2 stages:{d.picture(d.drawn(text))}\nThis"
        check_refused([found[number] for found in run.results], what)
        said = run.results[0][number]["text"].partition("\n")[0]
        check(
            {*re.findall(r"\b[FB]\d+(?:\.\d+)?", said)} & {*names.split(), *_never_started(text)},
            f"{what} should be refused with an error that names {names.replace(' ', ' or ')}; it "
            f"says {short(said)}.",
        )
    check_silent(run, "What is refused")


def _never_started(text: str) -> set[str]:
    """The names of all actions that can never start, of which any may be named."""
    schedule = d.drawn(text)
    started = {(event.stage, event.action) for event in d.timeline(schedule)}
    every = {(stage, action) for stage, actions in enumerate(schedule) for action in actions}
    return {str(action) for _, action in every - started}


UNCHECKED = (
    "The schedule cannot be run, or is not that of all micro-batches. Every rank has the whole "
    "schedule, and can refuse it before it sends anything."
)


@task("2.12")
def test_a_schedule_for_other_ranks_is_refused(grade: Grade) -> None:
    texts = [d.written(d.drawn(text)) for text in (d.ONE_F_ONE_B_3_4, ALONE)]
    run = grade.run(b.refusals, 2, texts, 4, if_stuck=UNCHECKED)
    for number, num_stages in enumerate((3, 1)):
        what = f"A schedule of {counted(num_stages, 'stage')} on 2 ranks"
        check_refused([found[number] for found in run.results], what, str(num_stages), "2")
    check_silent(run, "What is refused")


ALONE = "F0 B0 F1 B1 F2 B2 F3 B3"
