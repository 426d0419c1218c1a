"""Judges task 2.12: a program that runs any schedule, its results, memory, time and messages."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from judging.checks import check_refused, check_silent, check_waited, distance, edges_with, short
from judging.groups import MEMBERS, OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group

from distlab.grade import Grade, Run, Wrong, check, task
from distlab.sim import Options
from phase2 import drawings as d
from phase2 import pipelines as b
from phase2.pipeline_models import WIDTH, alone
from phase2_advanced.given import Action, Schedule

DRAWINGS = {
    "GPipe": d.GPIPE_3_4,
    "1F1B": d.ONE_F_ONE_B_3_4,
    "interleaved 1F1B": d.INTERLEAVED_2_4_2,
}
STUCK = (
    "Both ranks of a message must come to it at the same point of one order that all ranks know. A "
    "rank that first sends what it has while its neighbour does the same waits forever."
)
Result = dict[str, Any]


def _sizes(grade: Grade, m: int) -> list[int]:
    """Rows of m micro-batches, all different."""
    return grade.random.sample(range(3, 3 + 3 * m), m)


def _pipeline(
    grade: Grade,
    schedule: Schedule,
    kind: str = "dense",
    options: Options | None = None,
    sizes: Sequence[int] = (),
) -> Run:
    """Run a schedule that can be run, and check loss and gradients."""
    p, v = len(schedule), 1 + max(action.chunk for action in schedule[0])
    m = len(schedule[0]) // (2 * v)
    sizes = sizes or _sizes(grade, m)
    text = d.written(schedule)
    run = grade.run(b.run_pipeline, p, text, sizes, kind, options=options, if_stuck=STUCK)
    _check_results(run.results, schedule, v, sizes, kind)
    return run


def _check_results(
    results: Sequence[Result], schedule: Schedule, v: int, sizes: Sequence[int], kind: str
) -> None:
    p = len(schedule)
    expected = alone(v * p, sizes, kind)
    for rank, result in enumerate(results):
        here = f"micro-batches of {list(sizes)} rows, rank {rank} of {p}"
        _check_loss(here, result["loss"], expected)
        for chunk, gradients in enumerate(result["gradients"]):
            block = chunk * p + rank
            _check_gradients(f"{here}, block {block}", gradients, block, expected, schedule)
        check(
            result["loss"] == results[0]["loss"],
            f"{here}: the mean loss is {result['loss']!r}, but {results[0]['loss']!r} on rank 0. "
            "All ranks should return the same number.",
        )


def _check_loss(here: str, found: float, expected: Result) -> None:
    causes = {
        "mean of means": "That is the mean of the micro-batches' means, in which the small ones "
        "count too much.",
        "last": "That is the loss of the last micro-batch alone.",
    }
    said = [cause for name, cause in causes.items() if distance(expected[name], found) <= 1e-9]
    check(
        distance(expected["loss"], found) <= 1e-9,
        f"{here}: the mean loss over all {expected['targets']} targets is {expected['loss']:.6f}; "
        f"run_schedule returned {found:.6f}. {''.join(said[:1])}",
    )


def _check_gradients(
    here: str, found: dict[str, Any], block: int, expected: Result, schedule: Schedule
) -> None:
    for name, wanted in expected["gradients"][block].items():
        got = found[name]
        check(
            (wanted is None) == (got is None),
            f"{here}: {name} should have {'no' if wanted is None else 'a'} gradient, as in one "
            f"process, but has {'none' if got is None else 'one'}.{d.picture(schedule)}",
        )
        if wanted is not None and distance(wanted, got) > 1e-9:
            raise Wrong(
                f"{here}: the gradient of {name} is {short(got)}; in one process it is "
                f"{short(wanted)}. {_factor(wanted, got, expected)}{d.picture(schedule)}"
            )


def _factor(wanted: list[float], got: list[float], expected: Result) -> str:
    """What a constant factor tells."""
    largest = max(range(len(wanted)), key=lambda i: abs(wanted[i]))
    factor = got[largest] / wanted[largest] if wanted[largest] else 0.0
    if distance([factor * x for x in wanted], got) > 1e-9 * max(1.0, abs(factor)):
        return (
            "Does every micro-batch reach every block once, forward and backward, with its own "
            "inputs and its own gradient?"
        )
    if abs(factor - expected["targets"]) < 1e-6:
        return "That is the gradient of the sum of the losses: divide by the number of targets."
    if abs(factor - b.CALLS) < 1e-6:
        return "That is the sum of two calls: gradients from before the call do not count."
    return f"It is {factor:.4g} times as large on this rank: each target weighs 1/T, once."


# Results


@task("2.12", real=True)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(grade: Grade, p: int) -> None:
    m = 4
    forwards, backwards = ([Action(kind, i) for i in range(m)] for kind in "FB")
    first_in_first_out = [forwards + backwards for _ in range(p)]
    run = _pipeline(grade, first_in_first_out)
    if grade.is_simulated:
        check_waited(run)


@task("2.12")
@pytest.mark.parametrize("name", DRAWINGS)
def test_schedules_of_the_papers_are_run(grade: Grade, name: str) -> None:
    _pipeline(grade, d.drawn(DRAWINGS[name]))


@task("2.12")
@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 2), (2, 3, 1), (3, 3, 2), (5, 2, 1), (8, 3, 1)])
def test_any_schedule_that_can_be_run_is_run(grade: Grade, p: int, m: int, v: int) -> None:
    _pipeline(grade, d.shuffled(grade.random, p, m, v))


@task("2.12")
@pytest.mark.parametrize("kind", ["tokens", "frozen", "checkpointed"])
def test_models_of_many_kinds(grade: Grade, kind: str) -> None:
    _pipeline(grade, d.drawn(d.ONE_F_ONE_B_3_4), kind)


@task("2.12")
def test_a_pipeline_inside_a_group(grade: Grade) -> None:
    schedule, sizes = d.drawn(d.ONE_F_ONE_B_3_4), _sizes(grade, 4)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.run_pipeline, d.written(schedule), sizes, "dense"),
        if_stuck=STUCK_IN_GROUP,
    )
    _check_results([run.results[member] for member in MEMBERS], schedule, 1, sizes, "dense")


# Order, messages


@task("2.12")
@pytest.mark.parametrize("name", [*DRAWINGS, "by chance"])
def test_messages_may_go_one_after_the_other(grade: Grade, name: str) -> None:
    text = DRAWINGS.get(name)
    schedule = d.drawn(text) if text else d.shuffled(grade.random, 2, 4, 2)
    _pipeline(grade, schedule, options=Options(p2p_order="pair"))


@task("2.12")
@pytest.mark.parametrize("name", DRAWINGS)
def test_each_output_and_each_gradient_is_sent_once(grade: Grade, name: str) -> None:
    schedule = d.drawn(DRAWINGS[name])
    p, sizes = len(schedule), _sizes(grade, 4)
    run = _pipeline(grade, schedule, sizes=sizes)
    num_blocks = p * len(schedule[0]) // 8
    links = [(block % p, (block + 1) % p) for block in range(num_blocks - 1)]
    expected = Counter([*links, *(link[::-1] for link in links)])
    for rows in sizes:
        found = edges_with(run, num_bytes := _bytes_of(rows))
        for link in sorted({*expected, *found}):
            wanted, got = b.CALLS * expected[link], found.get(link, 0)
            check(
                got == wanted,
                f"a micro-batch of {rows} rows is {num_bytes:,} bytes between blocks. In "
                f"{b.CALLS} calls, rank {link[0]} should send rank {link[1]} {wanted} messages of "
                f"that size, each output and each gradient once; it sent {got}.",
            )
    _check_nothing_besides(run, links, sizes)


def _bytes_of(rows: int) -> int:
    return 8 * rows * 2 * WIDTH


def _check_nothing_besides(run: Run, links: list[tuple[int, int]], sizes: Sequence[int]) -> None:
    check(
        run.collectives == [b.CALLS] * len(run.results),
        "one broadcast in each call is enough: the last rank knows loss and number of targets. In "
        f"{b.CALLS} calls, the numbers of collectives by rank are {run.collectives}.",
    )
    data = b.CALLS * 2 * len(links) * sum(map(_bytes_of, sizes))
    most = data + b.CALLS * (2 * len(links) * len(sizes) * 1000 + 1000)
    check(
        sum(run.bytes_sent) <= most,
        f"outputs and gradients are {data:,} bytes in all, and {most:,} with their headers; your "
        f"ranks sent {sum(run.bytes_sent):,.0f}.",
    )


# Memory and time

IDEAL = {
    "GPipe": (d.drawn(d.GPIPE_4_2), 2, 1),
    "1F1B": (d.drawn(d.ONE_F_ONE_B_4_8), 8, 1),
    "interleaved 1F1B": (d.drawn(d.INTERLEAVED_2_4_2), 4, 2),
}


@task("2.12")
@pytest.mark.parametrize("name", IDEAL)
def test_a_backward_pass_frees_what_it_has_used(grade: Grade, name: str) -> None:
    schedule, m, v = IDEAL[name]
    p = len(schedule)
    run = grade.run(
        *(b.run_ideal, p, d.written(schedule), m, v), cluster=b.ideal(p), if_stuck=STUCK
    )
    for rank, peaks in enumerate(run.trace.peak_by_category if run.trace else []):
        found, most = peaks["activations"] / b.BLOCK_BYTES, d.in_flight(schedule[rank])
        check(
            found <= most + 0.6,
            f"{name}, {p} stages, {m} micro-batches: at most {most} are in flight in stage {rank}, "
            f"but it held the activations of {found:.1f}. Do the actions in the order of the "
            "schedule, and keep nothing of a micro-batch after its backward pass: no output, no "
            f"loss with its graph.{d.picture(schedule)}",
        )


@task("2.12")
@pytest.mark.parametrize("name", IDEAL)
def test_the_bubble_is_that_of_the_schedule(grade: Grade, name: str) -> None:
    schedule, m, v = IDEAL[name]
    p = len(schedule)
    run = grade.run(
        *(b.run_ideal, p, d.written(schedule), m, v), cluster=b.ideal(p), if_stuck=STUCK
    )
    forward_s = b.BLOCK_FLOPS / b.FLOPS_PER_S
    busy = 3 * forward_s * m * v
    expected_s = forward_s * d.length(schedule, 2)
    check(
        run.seconds <= expected_s * (1 + 1e-6),
        f"{name}, {p} stages of {v} blocks, {m} micro-batches: each stage should stand still for "
        f"{1 - busy / expected_s:.1%} of the time, (p-1)/(vm+p-1); yours do for "
        f"{1 - busy / run.seconds:.1%}. Does a rank wait for a message that it does not need yet, "
        "or for its own message to be received?",
    )


# Refusals


def _broken() -> list[tuple[str, str, list[str]]]:
    """What is wrong with a schedule of 3 micro-batches on 2 stages, it, and what may be named."""
    good = "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"
    return [
        ("B0 before F0 in stage 1", f"{good[0]}\nB0 F0 F1 B1 F2 B2", ["B0"]),
        ("B2 before F2 in stage 0", f"F0 F1 B0 B2 B1 F2\n{good[1]}", ["B2", "F2"]),
        ("F1 twice in stage 0", f"F0 F1 B0 F1 F2 B1 B2\n{good[1]}", ["F1"]),
        ("B2 twice in stage 1", f"{good[0]}\nF0 B0 F1 B1 F2 B2 B2", ["B2"]),
        ("no micro-batch 2 in stage 1", f"{good[0]}\nF0 B0 F1 B1", ["F2", "B2"]),
        ("no micro-batch 2", "F0 F1 B0 B1\nF0 B0 F1 B1", ["F2", "B2"]),
        ("no B1 in stage 0", f"F0 F1 B0 F2 B2\n{good[1]}", ["B1"]),
        ("a micro-batch 3", f"{good[0]} F3 B3\n{good[1]} F3 B3", ["F3", "B3"]),
        ("a second chunk", f"{good[0]} F0.1 B0.1\n{good[1]}", ["F0.1", "B0.1"]),
        ("stages that wait for each other", f"F0 B0 F1 F2 B1 B2\nF1 {good[1][:6]} B1 F2 B2", []),
    ]


@task("2.12")
@pytest.mark.parametrize(("wrong", "text", "names"), _broken(), ids=[one[0] for one in _broken()])
def test_what_is_no_schedule_is_refused(
    grade: Grade, wrong: str, text: str, names: list[str]
) -> None:
    run = grade.run(b.refused, 2, text, [4, 3, 5], 1, if_stuck=_unchecked(wrong))
    what = f"{wrong}, of 3 micro-batches on 2 stages:{d.picture(d.drawn(text))}\n"
    check_refused(run.results, what)
    said = set(re.findall(r"\b[FB]\d+(?:\.\d+)?", run.results[0]["text"].partition("\n")[0]))
    names = names or ["B0", "F1"]
    check(
        said & set(names),
        f"{what}the error should name {' or '.join(names)}; it says "
        f"{short(run.results[0]['text'])}.",
    )
    check_silent(run, "What is refused")


def _unchecked(wrong: str) -> str:
    return f"The schedule has {wrong}: every rank has all of it, and can refuse it at the start."


@task("2.12")
def test_a_schedule_for_other_ranks_is_refused(grade: Grade) -> None:
    for text in (d.ONE_F_ONE_B_3_4, d.GPIPE_4_2, "F0 B0"):
        schedule = d.drawn(text)
        sizes = [3] * (len(schedule[0]) // 2)
        run = grade.run(b.refused, 2, d.written(schedule), sizes, 1, if_stuck=_unchecked(text))
        what = f"A schedule of {len(schedule)} stages on 2 ranks"
        check_refused(run.results, what, str(len(schedule)), "2")
        check_silent(run, "What is refused")
