"""Judges task 4.8: the two intervals, and the expected duration."""

from collections.abc import Callable, Sequence
from math import exp, expm1, sqrt

import pytest

from distlab.grade import Grade, task
from judging.checks import check_silent
from judging.expect import expect
from phase4 import intervals as b
from phase4.intervals import Job

DAY_S = 86_400.0
NODES = (
    "A job that needs all of its nodes fails as soon as one of them does: N nodes fail N times as "
    "often as one, so that M = node_mtbf_s / num_nodes."
)


def _young_s(job: Job) -> float:
    return sqrt(2 * job.save_s * job.mtbf_s)


def _daly_s(job: Job) -> float:
    ratio = job.save_s / (2 * job.mtbf_s)
    if ratio >= 1:
        return job.mtbf_s
    return _young_s(job) * (1 + sqrt(ratio) / 3 + ratio / 9) - job.save_s


def _duration_s(work_s: float, interval_s: float, restart_s: float, job: Job) -> float:
    attempt_s = job.mtbf_s * expm1((interval_s + job.save_s) / job.mtbf_s)
    return attempt_s * exp(restart_s / job.mtbf_s) * work_s / interval_s


ONE_NODE = [Job(2, 100, 1), Job(0.5, 7200, 1), Job(60, 60, 1), Job(30, 16, 1)]
OFTEN = [Job(60, 30, 1), Job(100, 3 * DAY_S, 8000), Job(300, 900, 6)]  # δ is at least 2M
MANY_NODES = [Job(60, 30 * DAY_S, 1000), Job(180, 5 * 365 * DAY_S, 16_384), Job(5, 1e5, 3)]
SERIES = (
    "Young's interval is multiplied by 1 + ⅓ √(δ / 2M) + ⅑ · δ / 2M; then δ is subtracted, "
    "because the interval is that of the training alone."
)
INTERVALS: dict[str, tuple[str, Callable[[Job], float], Sequence[Job], str]] = {
    "the simple one": (
        *("young_interval_s", _young_s, ONE_NODE),
        "It is the square root of twice the save times the mean time between failures.",
    ),
    "where failures are frequent": ("daly_interval_s", _daly_s, ONE_NODE[:3], SERIES),
    "where a save takes longer than two failures": (
        *("daly_interval_s", _daly_s, OFTEN),
        f"From δ = 2M on, the interval is M: the series holds below that only. {NODES}",
    ),
    "the simple one for many nodes": ("young_interval_s", _young_s, MANY_NODES, NODES),
    "where many nodes fail": ("daly_interval_s", _daly_s, MANY_NODES, NODES),
}


@task("4.8")
@pytest.mark.parametrize("which", INTERVALS)
def test_the_interval(grade: Grade, which: str) -> None:
    function, right, jobs, cause = INTERVALS[which]
    run = grade.run(b.intervals_s, 1, function, jobs)
    check_silent(run, function)
    for job, found_s in zip(jobs, run.results[0], strict=True):
        expect(f"{function} {job}", found_s, right(job), cause, 1e-9 * right(job))


DURATIONS = [  # work, interval and restart, in seconds
    (1000.0, 20.0, 10.0, ONE_NODE[0]),
    (1000.0, 20.0, 0.0, ONE_NODE[0]),
    (500.0, 7.5, 30.0, Job(0, 40, 1)),
    (DAY_S, 518.0, 300.0, MANY_NODES[0]),
    (DAY_S, 60.0, 10.0, Job(1e-3, 1e12, 2)),
]


@task("4.8")
def test_how_long_a_run_takes(grade: Grade) -> None:
    run = grade.run(b.durations_s, 1, DURATIONS)
    check_silent(run, "expected_duration_s")
    for (work_s, interval_s, restart_s, job), found_s in zip(
        DURATIONS, run.results[0], strict=True
    ):
        right_s = _duration_s(work_s, interval_s, restart_s, job)
        expect(
            f"expected_duration_s {job}, with {work_s:g} s of work, intervals of {interval_s:g} s "
            f"and a restart of {restart_s:g} s,",
            *(found_s, right_s),
            "There are T/τ intervals; each takes M (e^((τ+δ)/M) − 1) without restarts, and "
            f"restarts make that e^(R/M) times as long. {NODES}",
            1e-4 * right_s,
        )
