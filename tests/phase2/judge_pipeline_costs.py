"""Judges task 2.12: memory, time, and what is refused."""

import re

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted
from judging.checks import MEASURED, check_refused, check_silent, short
from phase2 import drawings as d
from phase2 import pipelines as b
from phase2.judge_pipeline import STUCK

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
