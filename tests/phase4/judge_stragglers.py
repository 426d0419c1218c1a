"""Judges task 4.16: who is slow and in what, when nobody is, and that it costs next to nothing."""

from collections.abc import Sequence
from math import inf
from statistics import median_low
from typing import Any

import pytest

from distlab.grade import Grade, check, task
from judging.checks import MEASURED, is_close, of_members
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import stragglers as b
from phase4.judge_steps import check_small
from phase4.stragglers import Told, Work

STUCK = "All ranks call add after every step, and gather their medians in the same one."
Steps = Sequence[Sequence[Work]]


def _told(told: Told) -> str:
    return ", ".join(f"rank {r} by its {part}, ratio {ratio:.6g}" for r, part, ratio in told) or (
        "no straggler"
    )


def _check(by_rank: Sequence[Any], expected: Sequence[Told], what: str, cause: str) -> None:
    for rank, found in enumerate(by_rank):
        for step, (told, right) in enumerate(zip(found, expected, strict=True), start=1):
            check(
                is_close([[*one] for one in told], [[*one] for one in right], 1e-9),
                f"{what}: after step {step}, rank {rank} of {len(by_rank)} should hear of "
                f"{_told(right)}; it hears of {_told(told)}. {cause}",
            )


def _verdicts(windows: Sequence[Told], window: int) -> list[Told]:
    """Put what is told after each window behind the steps in which nothing is."""
    return [told for verdict in windows for told in [[]] * (window - 1) + [verdict]]


def _alike(num_ranks: int, work: Work = (0.25, 1.0), **slow: Work) -> list[Work]:
    """What ranks do in a step: all the same, but for ``r2=(0.25, 3.0)``."""
    return [slow.get(f"r{rank}", work) for rank in range(num_ranks)]


@task("4.16", real=True)
@pytest.mark.parametrize(("num_ranks", "slow"), [(3, 1), (2, 0), (2, 1)])
def test_a_slow_rank_and_what_it_is_slow_in(grade: Grade, num_ranks: int, slow: int) -> None:
    data = [_alike(num_ranks, **{f"r{slow}": (1.5, 1.0)})] * 3
    compute = [_alike(num_ranks, **{f"r{slow}": (0.5, 2.0)})] * 3
    run = grade.run(b.watch, num_ranks, [*data, *compute], {"window": 3}, if_stuck=STUCK)
    expected = _verdicts([[(slow, "data", 2.0)], [(slow, "compute", 2.0)]], 3)
    _check(
        *(
            run.results,
            expected,
            f"rank {slow} has twice as much to do as the others, and they wait",
        ),
        "Compare the own work, data_s + compute_s: step_s is the same on all ranks. The part to "
        "blame is the one in which the rank needs more seconds above the median of all ranks. "
        "Verdicts come after each window, the same on all ranks.",
    )


@task("4.16")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_several_slow_ranks(grade: Grade, num_ranks: int) -> None:
    first, second = sorted(grade.random.sample(range(num_ranks), 2))
    compute, data = (0.25, 4.75), (2.25, 1.5)
    steps = [_alike(num_ranks, **{f"r{first}": compute, f"r{second}": data})] * 2
    steps += [_alike(num_ranks, **{f"r{first}": data, f"r{second}": compute})] * 2
    run = grade.run(b.watch, num_ranks, steps, {"window": 2}, if_stuck=STUCK)
    falling = [(first, "compute", 4.0), (second, "data", 3.0)]
    rising = [(first, "data", 3.0), (second, "compute", 4.0)]
    expected = _verdicts([falling, rising], 2)
    _check(
        *(run.results, expected, f"ranks {first} and {second} are slow"),
        "Ratios are over the median of all ranks, which slow ranks hardly move, as they would the "
        "mean. Stragglers are ordered by rank, whatever their ratios are.",
    )


@task("4.16")
def test_two_slow_of_three_and_two_of_four(grade: Grade) -> None:
    steps = [_alike(4, r1=(0.25, 2.25), r2=(0.25, 2.25))]
    run = grade.run(b.watch, 4, steps, {"window": 1}, if_stuck=STUCK)
    _check(
        *(run.results, [[(1, "compute", 2.0), (2, "compute", 2.0)]], "two of four ranks are slow"),
        "Of two medians in the middle, take the lower one: median_low.",
    )
    steps = [_alike(3, (0.25, 2.25), r2=(0.25, 1.0))]
    run = grade.run(b.watch, 3, steps, {"window": 1}, if_stuck=STUCK)
    _check(
        *(run.results, [[]], "two of three ranks are slow"),
        "The median rank is one of these two: nobody is above it.",
    )


@task("4.16")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_if_all_are_slow_nobody_is(grade: Grade, num_ranks: int) -> None:
    steps = [_alike(num_ranks)] * 2 + [_alike(num_ranks, (2.0, 9.0))] * 2
    run = grade.run(b.watch, num_ranks, steps, {"window": 2}, if_stuck=STUCK)
    _check(
        *(run.results, [[]] * 4, f"all {num_ranks} ranks have the same to do, later more"),
        "Ranks are compared with each other, not with what they did before.",
    )


@task("4.16")
def test_single_slow_steps_make_no_straggler(grade: Grade) -> None:
    window = 5
    slow_steps = (grade.random.randrange(window - 1), window - 1)
    steps = [_alike(3, r0=(0.25, 99.0) if i in slow_steps else (0.25, 1.0)) for i in range(window)]
    run = grade.run(b.watch, 3, steps, {"window": window}, if_stuck=STUCK)
    _check(
        *(run.results, [[]] * window, "rank 0 takes 80 times as long in 2 of 5 steps"),
        "Take the median over the window; a mean is drawn up by a single step.",
    )


@task("4.16")
def test_medians_over_an_even_window(grade: Grade) -> None:
    totals = [1.0, 2.0, 4.0, 8.0]
    grade.random.shuffle(totals)
    steps = [_alike(2, (0.25, 0.75), r1=(0.25, total - 0.25)) for total in totals]
    run = grade.run(b.watch, 2, steps, {"window": 4}, if_stuck=STUCK)
    _check(
        *(
            run.results,
            _verdicts([[(1, "compute", 2.0)]], 4),
            f"rank 1 works {totals} s, rank 0 1 s",
        ),
        "Of the two steps in the middle, the shorter one counts: median_low.",
    )


@task("4.16")
def test_data_and_compute_are_added_before_the_median(grade: Grade) -> None:
    works = [(0.0, 3.0), (3.0, 0.0), (1.0, 1.0)]
    grade.random.shuffle(works)
    steps = [_alike(3, (0.5, 0.5), r2=work) for work in works]
    run = grade.run(b.watch, 3, steps, {"window": 3, "factor": 2.5}, if_stuck=STUCK)
    data, compute = (median_low(column) for column in zip(*works, strict=True))
    for rank, told in enumerate(run.results):
        check(
            len(told[-1]) == 1 and is_close([*told[-1][0]][::2], [2, 3.0]),
            f"rank 2 works {[sum(work) for work in works]} s in three steps, the others 1 s: "
            f"rank {rank} should hear of rank 2 with a ratio of 3; it hears of {_told(told[-1])}. "
            f"Add data and compute of each step first: the medians of its data, {data} s, and of "
            f"its compute, {compute} s, need not come from one step.",
        )


@task("4.16")
def test_a_part_is_compared_with_the_same_part_of_the_others(grade: Grade) -> None:
    steps = [_alike(3, (0.25, 8.0), r1=(4.5, 8.25))]
    run = grade.run(b.watch, 3, steps, {"window": 1}, if_stuck=STUCK)
    _check(
        *(run.results, [[(1, "data", 12.75 / 8.25)]], "rank 1 loads for 4.5 s and computes 8.25 s"),
        "The others load for 0.25 s and compute for 8 s: it is 4.25 s above them in its data, and "
        "0.25 s in compute, its longest part.",
    )
    steps = [_alike(3, (8.0, 0.25), r1=(8.25, 4.5))]
    run = grade.run(b.watch, 3, steps, {"window": 1}, if_stuck=STUCK)
    _check(
        run.results,
        [[(1, "compute", 12.75 / 8.25)]],
        "rank 1 loads for 8.25 s and computes for 4.5 s",
        "The others load for 8 s and compute for 0.25 s: it is 4.25 s above them in compute, and "
        "0.25 s in its data, its longest part.",
    )
    steps = [_alike(3, (0.25, 8.0), r1=(1.0, 12.0))]
    run = grade.run(b.watch, 3, steps, {"window": 1}, if_stuck=STUCK)
    _check(
        *(run.results, [[(1, "compute", 13 / 8.25)]], "rank 1 loads for 1 s and computes 12 s"),
        "The others load for 0.25 s and compute for 8 s: 4 s more in compute delay all ranks by "
        "more than 0.75 s of data, though these are four times as long as usual.",
    )


@task("4.16")
def test_factor_and_default_values(grade: Grade) -> None:
    at_it, above = [_alike(3, (0.0, 1.0), r0=(0.0, 1.5))], [_alike(3, (0.0, 1.0), r0=(0.0, 1.625))]
    options = {"window": 1, "factor": 1.5}
    run = grade.run(b.watch, 3, [*at_it, *above], options, if_stuck=STUCK)
    _check(
        *(run.results, [[], [(0, "compute", 1.625)]], "with factor=1.5, rank 0 takes 1.5 s"),
        "Where the median is 1 s, 1.5 s are not above factor times that, and 1.625 s are.",
    )
    steps = [_alike(2, (0.0, 1.0), r0=(0.0, 1.28125), r1=(0.0, 1.0))] * 50
    steps += [_alike(2, (0.0, 1.0), r0=(0.0, 1.3125))] * 50
    run = grade.run(b.watch, 2, steps, {}, if_stuck=STUCK)
    _check(
        *(run.results, _verdicts([[], [(0, "compute", 1.3125)]], 50), "without further arguments"),
        "By default, the window has 50 steps and the factor is 1.3.",
    )


@task("4.16")
def test_the_next_window_begins_empty(grade: Grade) -> None:
    steps = [_alike(3, r2=(0.25, 9.75))] * 3 + [_alike(3)] * 3 + [_alike(3, r1=(5.25, 1.0))] * 3
    run = grade.run(b.watch, 3, steps, {"window": 3}, if_stuck=STUCK)
    _check(
        *(
            run.results,
            _verdicts([[(2, "compute", 8.0)], [], [(1, "data", 5.0)]], 3),
            "windows of 3",
        ),
        "Each window is judged by its own steps.",
    )


@task("4.16")
def test_ranks_without_work(grade: Grade) -> None:
    steps = [_alike(3, (0.0, 0.0), r2=(0.5, 1.0)), _alike(3, (0.0, 0.0))]
    steps += [_alike(3, r0=(0.0, 0.0))]
    run = grade.run(b.watch, 3, steps, {"window": 1}, if_stuck=STUCK)
    _check(
        *(run.results, [[(2, "compute", inf)], [], []], "ranks that have nothing to do"),
        "Where the median rank works 0 s, whoever works is above it, with the ratio inf; a rank "
        "that is faster than the median is no straggler.",
    )


@task("4.16")
def test_nothing_is_sent_between_windows(grade: Grade) -> None:
    num_ranks, window = 4, 6
    steps = [_alike(num_ranks)] * (window - 1)
    run = grade.run(b.watch, num_ranks, steps, {"window": window}, if_stuck=STUCK)
    check(
        not any(run.collectives) and not any(run.messages),
        f"after {window - 1} steps of a window of {window}, nothing should have been sent; ranks "
        f"have called {run.collectives} collectives.",
    )
    steps = [_alike(num_ranks)] * (3 * window + 1)
    options = {"window": window}
    run = grade.run(b.watch, num_ranks, steps, options, options=MEASURED, if_stuck=STUCK)
    check_small(run, 3, 3 * 24, "StragglerDetector.add, in three full windows,")


@task("4.16")
def test_stragglers_inside_a_group(grade: Grade) -> None:
    steps = [_alike(3, r1=(0.25, 2.25))] * 2
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.watch, steps, {"window": 2}), if_stuck=STUCK_IN_GROUP
    )
    _check(
        *(of_members(run), [[], [(1, "compute", 2.0)]], "rank 1 of a group is slow"),
        "Ranks are those of the group.",
    )


@task("4.16")
def test_training_in_which_the_others_wait(grade: Grade) -> None:
    slow = grade.random.randrange(5)
    seconds = _alike(5, (0.5, 1.5), **{f"r{slow}": (0.5, 5.5)})
    run = grade.run(b.train, 5, seconds, 3, if_stuck=STUCK)
    _check(
        *(run.results, _verdicts([[(slow, "compute", 3.0)]], 3), "steps with an all-reduce"),
        f"All steps take 6 s on all ranks, but rank {slow} works for all of them and the others "
        "for 2 s.",
    )
