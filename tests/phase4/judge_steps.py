"""Judges task 4.14: the seconds of each part of a step, and the cost of gathering them.

Programs of steps that are drawn at random are compared with a model (``step_times.expected``).
"""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import counted, joined
from judging.checks import check_refused, is_close
from judging.expect import check_small, expect, expect_on_all_ranks, results_in_group
from phase4 import step_times as b
from phase4.step_times import Event, Times

NAMES = ("step_s", "data_s", "compute_s", "communication_s")
STUCK = "All ranks gather their times together, by one collective that all of them call."
CAUSES = {  # likely causes of wrong times, by the events of a program: the first that fits
    "fail": "An error ends the parts that it leaves: put what comes after yield into finally.",
    "launch": "Starting kernels takes no time, and the device works on them until synchronize has "
    "returned. Call synchronize first and read the clock then: when the timer is made, when a part "
    "begins or ends, and when a step ends.",
    "part": "Time in an inner part counts for this one alone; when it ends, the outer one goes on. "
    "A part that is entered twice in a step gets the sum; a new step begins with nothing.",
    "": "The first step begins when the timer is made, and each of the others when the one before "
    "has ended.",
}


def _in_words(times: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(NAMES, times, strict=True))


def _check_times(
    times: Sequence[Any],
    right: Sequence[Times],
    what: str,
    cause: str,
    tolerance: float = 1e-6,
) -> None:
    for step, (actual, wanted) in enumerate(zip(times, right, strict=True)):
        check(
            is_close([*actual], [*wanted], tolerance),
            f"{what}: step {step} should have {_in_words(wanted)}; it has {_in_words(actual)}. "
            f"{cause}",
        )


@task("4.14")
def test_times_of_steps(grade: Grade) -> None:
    programs = [b.draw(grade.random, 2, most) for most in (1, 2, 3) for _ in range(30)]
    programs.sort(key=lambda program: len(_program_in_words(program)))  # the shortest says most
    for program, (times, lost_s) in zip(programs, grade.call(b.split, programs), strict=True):
        text = _program_in_words(program)
        cause = next(cause for word, cause in CAUSES.items() if word in text)
        _check_times(times, b.expected(program), f"steps of {text}", cause)
        check(
            lost_s < b.READING_S,
            f"steps of {text}: {lost_s / b.READING_S:.0f} readings of the clock are in no step. "
            "One reading ends a step and begins the next: with a second one, what is between them, "
            "a wait for the device too, is lost.",
        )


def _program_in_words(program: Sequence[Event]) -> str:
    return ", ".join(map(_event_in_words, program))


def _event_in_words(event: Event) -> str:
    kind, *values = event
    if kind in ("part", "fail"):
        names = values[0] if kind == "part" else "/".join(values[0])
        return f"{kind} {names}({_program_in_words(values[1])})"
    return f"{kind} {values[0]:g} s" if values else "end"


@task("4.14")
@pytest.mark.parametrize("name", ["dta", ""])
def test_a_part_that_is_mistyped(grade: Grade, name: str) -> None:
    facts = grade.call(b.mistype, name)
    check_refused([facts], f"part({name!r})", repr(name), "data", "compute", "communication")
    check(
        not facts["ran"],
        f"part({name!r}) should be refused on entry; what is inside of it has run. An error that "
        "comes when it is left takes the place of the one that left it.",
    )
    _check_times(
        *(facts["times"], [(5.0, 0.0, 5.0, 0.0)], f"part({name!r}) inside of compute"),
        "What is refused changes nothing: compute goes on. Look at the name before you open it.",
    )


@task("4.14")
@pytest.mark.parametrize(("num_batches", "leave"), [(0, ""), (4, ""), (3, "break"), (3, "error")])
def test_waiting_for_batches_is_data(grade: Grade, num_batches: int, leave: str) -> None:
    start_s, end_s, *waits_s = (grade.random.randrange(8, 99) / 8 for _ in range(num_batches + 2))
    facts = grade.call(b.loop, start_s, waits_s, end_s, leave)
    where = f"a loader of {counted(num_batches, 'batch', 'batches')}"
    where += f", left by {leave} at the second one" if leave else ""
    last = 1 if leave else num_batches
    expect(f"{where}: what batches yields", facts["batches"], [*range(last)])
    expect(
        f"{where}: the number of batches that the loader was asked for, as each of them comes,",
        *(facts["asked"], [*range(1, last + 1)]),
        "Ask for the next batch when the loop wants it.",
    )
    first, *others = [*waits_s, end_s]
    waits = [first + start_s, *others][: last + 1]
    right = [(wait + 3, wait, 2.0, 0.0) for wait in waits[:-1]]
    right += [(waits[-1] + 8, waits[-1], 0.0, 0.0)]
    times = joined([f"{wait_s:g} s" for wait_s in (start_s, *waits_s, end_s)])
    _check_times(
        *(facts["times"], right, f"{where}, which takes {times} to start, for each and to end"),
        "Starting counts as data, and so do the last seconds, after which there is no batch: they "
        "belong to the step that follows. What the loop does with a batch is not data, and no part "
        "is open when it has ended.",
    )


@task("4.14")
def test_waiting_for_the_slowest_rank_is_communication(grade: Grade) -> None:
    seconds = [grade.random.randrange(1, 40) / 8 for _ in range(4)]
    slowest = max(seconds)
    run = grade.run(b.train, len(seconds), seconds, 3, if_stuck=STUCK)
    for rank, times in enumerate(run.results):
        right = (slowest, 0.0, seconds[rank], slowest - seconds[rank])
        _check_times(
            *(times, [right] * 3, f"ranks compute for {seconds} s, then all-reduce; rank {rank}"),
            "The default clock is time.perf_counter, and waiting for the network is communication.",
            1e-3,
        )
    expect(
        "the number of collectives in 3 steps with an all-reduce each, by rank,",
        *(run.collectives, [3] * len(seconds), "A timer needs no communication."),
    )


def _times(grade: Grade) -> list[Times]:
    return [tuple(grade.random.random() for _ in NAMES) for _ in range(3)]


def _check_gathered(by_rank: Sequence[Any], right: Sequence[Times]) -> None:
    as_tuples = [[*map(tuple, times)] for times in by_rank]
    cause = "Rank by rank, just as they were given: float32 rounds, float64 does not."
    expect_on_all_ranks("what gather_times returns", as_tuples, [*right], cause)


@task("4.14", real=True)
def test_every_rank_knows_the_times_of_all(grade: Grade) -> None:
    right = _times(grade)
    run = grade.run(b.gather, 3, right, if_stuck=STUCK)
    _check_gathered(run.results, right)
    if grade.is_simulated:
        check_small(run, 1, 32, "gather_times")


@task("4.14")
def test_gathering_times_inside_a_group(grade: Grade) -> None:
    right = _times(grade)
    _check_gathered(results_in_group(grade, b.gather, right), right)
