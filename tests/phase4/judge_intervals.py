"""Judges task 4.8: the two intervals, the expected duration, and a training in which nodes fail."""

from collections.abc import Sequence
from math import exp, expm1, sqrt

from distlab.grade import Grade, check, task
from judging.checks import check_silent, is_close
from phase4 import intervals as b
from phase4.intervals import Job, Training

DAY_S = 86_400.0
ONE_NODE = [Job(2, 100, 1), Job(0.5, 7200, 1), Job(60, 60, 1), Job(30, 16, 1)]
OFTEN = [Job(60, 30, 1), Job(100, 3 * DAY_S, 8000), Job(300, 900, 6)]  # δ is at least 2M
MANY_NODES = [Job(60, 30 * DAY_S, 1000), Job(180, 5 * 365 * DAY_S, 16_384), Job(5, 1e5, 3)]
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


def _check_intervals(
    grade: Grade, function: str, jobs: Sequence[Job], expected: Sequence[float], cause: str
) -> None:
    run = grade.run(b.intervals_s, 1, function, jobs)
    check_silent(run, function)
    for job, found_s, right_s in zip(jobs, run.results[0], expected, strict=True):
        check(
            is_close(found_s, right_s, 1e-9 * right_s),
            f"{function} {job}: expected {right_s:.6g} s, found {found_s:.6g} s. {cause}",
        )


@task("4.8")
def test_the_simple_interval(grade: Grade) -> None:
    cause = "It is the square root of twice the save times the mean time between failures."
    _check_intervals(
        grade, "young_interval_s", ONE_NODE, [_young_s(job) for job in ONE_NODE], cause
    )


@task("4.8")
def test_the_interval_where_failures_are_frequent(grade: Grade) -> None:
    cause = (
        "Young's interval is multiplied by 1 + ⅓ √(δ / 2M) + ⅑ · δ / 2M; then δ is subtracted, "
        "because the interval is that of the training alone."
    )
    jobs = ONE_NODE[:3]
    _check_intervals(grade, "daly_interval_s", jobs, [_daly_s(job) for job in jobs], cause)


@task("4.8")
def test_the_interval_where_a_save_takes_longer_than_two_failures(grade: Grade) -> None:
    cause = "From δ = 2M on, the interval is M: the series holds below that only. " + NODES
    _check_intervals(grade, "daly_interval_s", OFTEN, [_daly_s(job) for job in OFTEN], cause)


@task("4.8")
def test_many_nodes_fail_more_often_than_one(grade: Grade) -> None:
    for function, right in (("young_interval_s", _young_s), ("daly_interval_s", _daly_s)):
        _check_intervals(grade, function, MANY_NODES, [right(job) for job in MANY_NODES], NODES)


@task("4.8")
def test_how_long_a_run_takes(grade: Grade) -> None:
    cases = [
        (1000.0, 20.0, 10.0, ONE_NODE[0]),
        (1000.0, 20.0, 0.0, ONE_NODE[0]),
        (500.0, 7.5, 30.0, Job(0, 40, 1)),
        (DAY_S, 518.0, 300.0, MANY_NODES[0]),
        (DAY_S, 60.0, 10.0, Job(1e-3, 1e12, 2)),
    ]
    run = grade.run(b.durations_s, 1, cases)
    check_silent(run, "expected_duration_s")
    for (work_s, interval_s, restart_s, job), found_s in zip(cases, run.results[0], strict=True):
        right_s = _duration_s(work_s, interval_s, restart_s, job)
        check(
            is_close(found_s, right_s, 1e-4 * right_s),
            f"expected_duration_s {job}, with {work_s:g} s of work, intervals of {interval_s:g} s "
            f"and a restart of {restart_s:g} s: expected {right_s:.6g} s, found {found_s:.6g} s. "
            "There are T/τ intervals; each takes M (e^((τ+δ)/M) − 1) without restarts, and "
            f"restarts make that e^(R/M) times as long. {NODES}",
        )


@task("4.8")
def test_a_training_run_in_which_nodes_fail(grade: Grade) -> None:
    job = Job(save_s=100, node_mtbf_s=2000, num_nodes=2)
    training = Training(job, 60_000.0, 60.0, grade.random.randrange(2**20))
    expected_s = grade.run(b.expected_s, 1, training).results[0]
    measured_s, failures = {}, 0
    for factor in (1.0, 1 / 4, 4.0):
        run = grade.run(b.train, job.num_nodes, training, factor)
        measured_s[factor] = run.seconds
        failures = sum(run.results) if factor == 1.0 else failures
    where = (
        f"{training.work_s / 3600:.1f} hours of training on {job.num_nodes} simulated nodes, with "
        f"a save of {job.save_s:g} s and {failures} failures"
    )
    for factor in (1 / 4, 4.0):
        check(
            measured_s[1.0] < measured_s[factor],
            f"{where}, took {measured_s[1.0] / 3600:.2f} hours with the interval of "
            f"daly_interval_s, and {measured_s[factor] / 3600:.2f} with {factor:.2g} times that: "
            "the best interval should be near yours.",
        )
    check(
        abs(expected_s / measured_s[1.0] - 1) < 0.15,
        f"{where}, took {measured_s[1.0] / 3600:.2f} hours; expected_duration_s says "
        f"{expected_s / 3600:.2f}. {NODES}",
    )
