"""Judges the runs of task 1.8: which of them count, and how they begin."""

from itertools import pairwise
from random import Random
from statistics import fmean, median, median_high, median_low

import pytest

from distlab.grade import Grade, check, task
from judging.checks import UNIFORM, short
from phase1 import measurement as m
from phase1.line import are_close


@task("1.8")
@pytest.mark.parametrize("repeats", [1, 2, 4, 5])
def test_the_slowest_rank_counts_in_the_median_run(grade: Grade, repeats: int) -> None:
    sizes = [4 * size for size in grade.random.sample(range(1, 2000), 2)]
    schedules = {name: [_drawn(grade.random, repeats) for _ in sizes] for name in ("a", "b")}
    run = grade.run(m.measure_sleepers, 3, schedules, sizes, repeats, cluster=UNIFORM)
    for rank, table in enumerate(run.results):
        for name, schedule in schedules.items():
            got = table["seconds"].get(name, [])
            check(
                len(got) == len(sizes),
                f"rank {rank}: the table should have 2 times for strategy {name}, one for each "
                f"size; it has {len(got)}.",
            )
            are_equal = all(other["seconds"].get(name) == got for other in run.results)
            for seconds, cell in zip(got, schedule, strict=True):
                _check_median(seconds, cell, rank, are_equal)


def _drawn(random: Random, repeats: int) -> list[list[float]]:
    """Draw seconds by rank and run, of which the first does not count, that expose mistakes."""
    while True:
        cell = [
            [round(10 ** random.uniform(0, 2), 2) for _ in range(repeats + 1)] for _ in range(3)
        ]
        low, high = _accepted(cell)
        others = sorted(_mistakes(cell).values())
        if repeats < 3 or repeats % 2 == 0:  # then several mistakes come out right
            return cell
        all_differ = all(1.02 * a < b for a, b in pairwise(others))
        if all_differ and all(not _is_in(other, 0.98 * low, 1.02 * high) for other in others):
            return cell


def _accepted(cell: list[list[float]]) -> tuple[float, float]:
    slowest = [max(run) for run in zip(*cell, strict=True)][1:]
    return median_low(slowest), median_high(slowest)


def _mistakes(cell: list[list[float]]) -> dict[str, float]:
    """The results of common mistakes."""
    slowest = [max(run) for run in zip(*cell, strict=True)]
    return {
        "That is the mean of the runs: take the median.": fmean(slowest[1:]),
        "That is the fastest run: take the median.": min(slowest[1:]),
        "That is the slowest run: take the median.": max(slowest[1:]),
        "Do not time the first run, which opens the connections.": median(slowest),
        "Do not time the first run, but time every run after it.": median(slowest[:-1]),
        "A different rank may be the slowest in each run: first take the slowest rank of every "
        "run, and then the median of the runs.": max(median(times[1:]) for times in cell),
    }


def _cause(got: float, cell: list[list[float]], are_equal: bool) -> str:
    if got < 0.01:
        return (
            "Does your clock run while a rank sleeps? time.perf_counter does, but "
            "time.process_time does not."
        )
    if not are_equal:
        return (
            "The ranks' tables differ: in each run, the time that counts is that of the slowest of "
            "all ranks."
        )
    found = (text for text, seconds in _mistakes(cell).items() if _is_in(got, seconds))
    return next(found, "Take the slowest rank of each timed run, and then the median.")


def _check_median(got: float, cell: list[list[float]], rank: int, are_equal: bool) -> None:
    low, high = _accepted(cell)
    slowest = [max(run) for run in zip(*cell, strict=True)][1:]
    check(
        _is_in(got, low, high),
        f"rank {rank} of 3: the slowest rank took {slowest} s in the timed runs, so the median is "
        f"{low if low == high else f'{low} to {high}'} s; you measured {got:.4g} s. "
        f"{_cause(got, cell, are_equal)}",
    )


def _is_in(value: float, low: float, high: float | None = None) -> bool:
    return 0.999 * low <= value <= 1.001 * (low if high is None else high)


@task("1.8")
def test_all_ranks_start_each_run_together(grade: Grade) -> None:
    order, seconds = [0, 1, 2], round(grade.random.uniform(1, 9), 2)
    grade.random.shuffle(order)
    orders = {f"begins_{order[i]}": order[i:] + order[:i] for i in range(3)}
    for rank, table in enumerate(grade.run(m.measure_chains, 3, orders, seconds).results):
        for name, expected in ((name, 2 * seconds) for name in orders):
            got = table["seconds"].get(name, [])
            check(
                len(got) == 2 and are_close(got, [expected] * 2, 0.001),
                f"rank {rank} of 3: two ranks that sleep {seconds} s, one after the other, take "
                f"{expected} s; you measured {short(got)} s. All ranks must start each run "
                "together: no rank may begin before all the others are ready.",
            )
