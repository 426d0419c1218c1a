"""Judges task 4.8: the two intervals, and the expected duration."""

from collections.abc import Callable, Sequence
from math import exp, expm1, sqrt

import pytest

from distlab.grade import Grade, task
from judging.checks import check_silent
from judging.expect import expect
from phase4 import intervals as b

DAY_S = 86_400.0
NODES = (
    "A job that needs all of its nodes fails as soon as one of them does: N nodes fail N times as "
    "often as one, so that M = node_mtbf_s / num_nodes."
)


def _young_s(save_s: float, mtbf_s: float) -> float:
    return sqrt(2 * save_s * mtbf_s)


def _daly_s(save_s: float, mtbf_s: float) -> float:
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return _young_s(save_s, mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


INTERVALS: dict[str, tuple[Callable[[float, float], float], str]] = {
    "young_interval_s": (
        _young_s,
        "It is the square root of twice the save times the mean time between failures.",
    ),
    "daly_interval_s": (
        _daly_s,
        "Below δ = 2M, Young's interval is multiplied by 1 + ⅓ √(δ / 2M) + ⅑ · δ / 2M; then δ is "
        "subtracted, because the interval is that of the training alone. From δ = 2M on, the "
        "interval is M.",
    ),
}
JOBS = [  # save_s, node_mtbf_s, num_nodes
    *((2, 100, 1), (0.5, 7200, 1), (60, 60, 1), (30, 16, 1)),
    *((60, 30, 1), (100, 3 * DAY_S, 8000), (300, 900, 6)),  # δ is at least 2M
    *((60, 30 * DAY_S, 1000), (180, 5 * 365 * DAY_S, 16_384), (5, 1e5, 3)),
]


@task("4.8")
@pytest.mark.parametrize("function", INTERVALS)
def test_the_interval(grade: Grade, function: str) -> None:
    _check(grade, function, JOBS, *INTERVALS[function], 1e-9)


RUNS = [  # work_s, interval_s, save_s, restart_s, node_mtbf_s, num_nodes
    (1000.0, 20.0, 2.0, 10.0, 100.0, 1),
    (1000.0, 20.0, 2.0, 0.0, 100.0, 1),
    (500.0, 7.5, 0.0, 30.0, 40.0, 1),
    (DAY_S, 518.0, 60.0, 300.0, 30 * DAY_S, 1000),
    (DAY_S, 60.0, 1e-3, 10.0, 1e12, 2),
]


def _duration_s(
    work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float
) -> float:
    attempt_s = mtbf_s * expm1((interval_s + save_s) / mtbf_s)
    return attempt_s * exp(restart_s / mtbf_s) * work_s / interval_s


@task("4.8")
def test_how_long_a_run_takes(grade: Grade) -> None:
    cause = (
        "There are T/τ intervals; each takes M (e^((τ+δ)/M) − 1) without restarts, and restarts "
        "make that e^(R/M) times as long."
    )
    _check(grade, "expected_duration_s", RUNS, _duration_s, cause, 1e-4)


def _check(
    grade: Grade,
    function: str,
    calls: Sequence[tuple[float, ...]],
    formula: Callable[..., float],
    cause: str,
    tolerance: float,
) -> None:
    run = grade.run(b.seconds, 1, function, calls)
    check_silent(run, function)
    for call, answer_s in zip(calls, run.results[0], strict=True):
        *times_s, node_mtbf_s, num_nodes = call
        right_s = formula(*times_s, node_mtbf_s / num_nodes)
        what = f"{function}({', '.join(f'{number:g}' for number in call)})"
        why = f"{cause} {NODES}" if num_nodes > 1 else cause
        expect(what, answer_s, right_s, why, tolerance * right_s)
