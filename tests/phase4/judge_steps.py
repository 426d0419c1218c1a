"""Judges task 4.14: what counts for which part of a step, and what gathering times costs."""

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.util.text import counted, joined
from judging.checks import (
    MEASURED,
    check_refused,
    check_silent,
    is_close,
    of_members,
    short,
)
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import step_times as b
from phase4.step_times import Event, Times

NAMES = ("step_s", "data_s", "compute_s", "communication_s")
STUCK = "All ranks gather their times together, by one collective that all of them call."


def _told(times: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(NAMES, times, strict=True))


def _check_times(found: Sequence[Any], expected: Sequence[Times], what: str, cause: str) -> None:
    for step, (got, right) in enumerate(zip(found, expected, strict=True)):
        check(
            is_close([*got], [*right], 1e-6),
            f"{what}: step {step} should have {_told(right)}; it has {_told(got)}. {cause}",
        )


@task("4.14")
def test_times_of_a_step(grade: Grade) -> None:
    events: list[Event] = []
    expected = []
    for _ in range(4):
        data, compute, communication, rest = (grade.random.randrange(1, 99) / 8 for _ in range(4))
        events += [("work", rest / 2), ("part", "data", [("work", data)])]
        events += [("part", "compute", [("work", compute / 4)]), ("work", rest / 2)]
        events += [("part", "communication", [("work", communication)])]
        events += [("part", "compute", [("work", 3 * compute / 4)]), ("end",)]
        expected.append((data + compute + communication + rest, data, compute, communication))
    run = grade.run(b.split, 1, [*events, ("end",)], False)
    _check_times(
        *(run.results[0], [*expected, (0.0,) * 4], "parts one after the other"),
        "The first step begins when the timer is made, and each of the others when the one before "
        "has ended. A part that is entered twice in a step gets the sum; a new step begins with "
        "nothing.",
    )
    check_silent(run, "splitting the time of a step")


@task("4.14")
def test_parts_inside_of_each_other(grade: Grade) -> None:
    a, c, d = (grade.random.randrange(1, 99) / 8 for _ in range(3))
    inner: Event = ("part", "communication", [("work", c)])
    events: list[Event] = [("part", "compute", [("work", a), inner, ("work", d), inner]), ("end",)]
    events += [("part", "data", [("part", "compute", [inner, ("work", a)]), ("work", d)]), ("end",)]
    events += [("part", "compute", [("part", "compute", [("work", a)]), ("work", d)]), ("end",)]
    events += [("part", "communication", [("part", "compute", [("work", a)])]), ("end",)]
    expected = [
        (a + 2 * c + d, 0.0, a + d, 2 * c),
        (a + c + d, d, a, c),
        (a + d, 0.0, a + d, 0.0),
        (a, 0.0, a, 0.0),
    ]
    _check_times(
        *(grade.call(b.split, events, False), expected, "parts inside of each other"),
        "Time in an inner part counts for this one alone. When it ends, the outer one goes on.",
    )


@task("4.14")
def test_an_error_ends_the_parts_around_it(grade: Grade) -> None:
    failing: Event = ("part", "communication", [("work", 1.0), ("raise",)])
    around: Event = ("part", "compute", [("work", 2.0), ("fail", [failing]), ("work", 4.0)])
    through: Event = ("fail", [("part", "data", [("work", 8.0), failing])])
    events: list[Event] = [around, ("work", 16.0), ("end",), through, ("work", 32.0), ("end",)]
    events += [("work", 64.0), ("part", "data", [("work", 1.0)]), ("work", 2.0), ("end",)]
    expected = [(23.0, 0.0, 6.0, 1.0), (41.0, 8.0, 0.0, 1.0), (67.0, 1.0, 0.0, 0.0)]
    _check_times(
        *(grade.call(b.split, events, False), expected, "errors inside of parts"),
        "An error ends the part that it leaves: put what comes after yield into finally.",
    )


@task("4.14")
@pytest.mark.parametrize("name", ["dta", "rest", ""])
def test_a_part_that_is_mistyped(grade: Grade, name: str) -> None:
    found = grade.call(b.mistype, name)
    check_refused([found], f"part({name!r})", repr(name), "data", "compute", "communication")
    check(
        not found["ran"],
        f"part({name!r}) should be refused on entry; what is inside of it has run. An error that "
        "comes when it is left takes the place of the one that left it.",
    )
    _check_times(
        *(found["times"], [(5.0, 0.0, 5.0, 0.0)], f"part({name!r}) inside of compute"),
        "What is refused changes nothing: compute goes on. Look at the name before you open it.",
    )


@task("4.14")
def test_no_time_is_lost_between_steps(grade: Grade) -> None:
    num_steps = 20
    found = grade.call(b.tick, num_steps)
    check(
        found["least_s"] <= found["sum_s"] <= found["most_s"],
        f"on a clock that goes on by 1 s with each reading, {num_steps} steps should take "
        f"{found['least_s']:g} s in all, from the first reading to the last one; the sum of their "
        f"step_s is {found['sum_s']:g} s. One reading ends a step and begins the next: with a "
        "second one, what is between them, a wait for the device too, is in no step.",
    )


@task("4.14")
def test_the_device_has_finished_before_the_clock_is_read(grade: Grade) -> None:
    a, c, d = (grade.random.randrange(1, 99) / 8 for _ in range(3))
    inner: Event = ("part", "communication", [("launch", c)])
    events: list[Event] = [("launch", d), ("part", "compute", [("launch", a), inner])]
    events += [("part", "data", [("work", d)]), ("launch", a), ("end",)]
    events += [("part", "compute", [("launch", c)]), ("end",), ("end",)]
    expected = [(2 * a + c + 2 * d, d, a, c), (c, 0.0, c, 0.0), (0.0,) * 4]
    _check_times(
        *(grade.call(b.split, events, True), expected, "kernels that a GPU still computes"),
        "Starting kernels takes no time, and the device works on them until synchronize has "
        "returned. Call synchronize first and read the clock then: when the timer is made, when a "
        "part begins or ends, and when a step ends.",
    )


def _told_waits(waits_s: Sequence[float]) -> str:
    return f", then {joined([f'{wait_s:g} s' for wait_s in waits_s])}" if waits_s else ""


@task("4.14")
@pytest.mark.parametrize("num_batches", [0, 1, 4])
def test_waiting_for_batches_is_data(grade: Grade, num_batches: int) -> None:
    start_s, end_s = grade.random.randrange(8, 99) / 8, grade.random.randrange(8, 99) / 8
    waits_s = [grade.random.randrange(8, 99) / 8 for _ in range(num_batches)]
    found = grade.call(b.loop, start_s, waits_s, end_s)
    where = f"a loader of {counted(num_batches, 'batch', 'batches')}"
    check(
        found["batches"] == [*range(num_batches)],
        f"{where}: batches should yield {[*range(num_batches)]}; it yields {found['batches']}.",
    )
    check(
        found["asked"] == [*range(1, num_batches + 1)],
        f"{where}: when batch k comes, k + 1 of them should have been asked for; they were "
        f"{found['asked']}. Ask for the next batch when the loop wants it.",
    )
    waits = [*waits_s, end_s]
    waits[0] += start_s
    expected = [(wait + 3, wait, 2.0, 0.0) for wait in waits[:-1]] + [(waits[-1], waits[-1], 0, 0)]
    _check_times(
        *(
            found["times"],
            expected,
            f"{where}, which takes {start_s} s to start{_told_waits(waits_s)}",
        ),
        f"Starting counts as data, and so do the last {end_s} s, after which there is no batch: "
        "they belong to the step that follows. What the loop does with a batch is not data.",
    )


@task("4.14")
@pytest.mark.parametrize("how", ["break", "error"])
def test_a_loop_that_is_left(grade: Grade, how: str) -> None:
    _check_times(
        *(grade.call(b.leave_loop, how), [(2.0, 2.0, 0.0, 0.0), (8.0, 0.0, 0.0, 0.0)]),
        f"a loop over batches that ends with {how} at its second batch, for which it waited 2 s",
        "After that, no part is open, and what follows is not data.",
    )


@task("4.14")
def test_waiting_for_the_slowest_rank_is_communication(grade: Grade) -> None:
    seconds = [grade.random.randrange(1, 40) / 8 for _ in range(4)]
    run = grade.run(b.train, len(seconds), seconds, 3, if_stuck=STUCK)
    for rank, times in enumerate(run.results):
        expected = (max(seconds), 0.0, seconds[rank], max(seconds) - seconds[rank])
        for step, got in enumerate(times):
            check(
                is_close([*got], [*expected], 1e-3),
                f"ranks compute for {seconds} s, and wait in an all-reduce for the slowest: step "
                f"{step} of rank {rank} should have about {_told(expected)}; it has {_told(got)}. "
                "The default clock is time.perf_counter, and waiting for the network is "
                "communication.",
            )
    check(
        run.collectives == [3] * len(seconds),
        "3 steps with an all-reduce each call 3 collectives on each rank; with the timer they are "
        f"{run.collectives}. A timer needs no communication.",
    )


def _check_gathered(by_rank: Sequence[Any], expected: Sequence[Times]) -> None:
    for rank, found in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}"
        check(
            len(found) == len(expected),
            f"gather_times should return the times of {len(expected)} ranks; on {where} it returns "
            f"{len(found)}.",
        )
        check(
            [tuple(times) for times in found] == [*expected],
            f"gather_times should return {short([*expected])} on {where}, rank by rank, just as "
            f"they were given; it returns {short(found)}. float32 rounds, float64 does not.",
        )


def _times(grade: Grade, num_ranks: int) -> list[Times]:
    return [tuple(grade.random.random() for _ in NAMES) for _ in range(num_ranks)]


@task("4.14", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_knows_the_times_of_all(grade: Grade, num_ranks: int) -> None:
    expected = _times(grade, num_ranks)
    _check_gathered(grade.run(b.gather, num_ranks, expected, if_stuck=STUCK).results, expected)


@task("4.14")
@pytest.mark.parametrize("num_ranks", [1, 5, 8])
def test_gathering_costs_one_small_collective(grade: Grade, num_ranks: int) -> None:
    expected = _times(grade, num_ranks)
    run = grade.run(b.gather, num_ranks, expected, options=MEASURED, if_stuck=STUCK)
    _check_gathered(run.results, expected)
    check_small(run, 1, 32, "gather_times")


def check_small(run: Run, num_collectives: int, num_bytes: int, what: str) -> None:
    """Check the cost of gathering a few numbers, or of reducing as many.

    Args:
        run: of the simulated world.
        num_collectives: at most.
        num_bytes: that each rank may contribute, in all.
        what: function.
    """
    most = num_bytes * 2 * (len(run.results) - 1)
    for rank, (calls, sent) in enumerate(zip(run.collectives, run.bytes_sent, strict=True)):
        check(
            calls <= num_collectives,
            f"{what} should call at most {num_collectives} collectives; rank {rank} of "
            f"{len(run.results)} called {calls}. Put all numbers into one tensor; gathering "
            "objects takes several collectives.",
        )
        check(
            sent <= most,
            f"{what}: rank {rank} of {len(run.results)} sent {sent:g} bytes, and {most} are "
            f"enough for {num_bytes} bytes from each rank. Send a tensor with these numbers alone.",
        )


@task("4.14")
def test_gathering_times_inside_a_group(grade: Grade) -> None:
    expected = _times(grade, 3)
    run = grade.run(inside_group, OUTER_WORLD_SIZE, b.gather, expected, if_stuck=STUCK_IN_GROUP)
    _check_gathered(of_members(run), expected)
