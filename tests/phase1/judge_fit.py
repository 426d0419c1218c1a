"""Judges ``fit_alpha_beta`` of task 1.8: the line through points."""

from random import Random
from sys import float_info

from distlab.grade import Grade, check, task
from phase1 import measurement as m
from phase1.line import best_line, in_us


@task("1.8")
def test_the_line_through_points(grade: Grade) -> None:
    points = [([0, 1000, 2000], [5e-6, 6e-6, 7e-6])]
    points += [_noisy(grade.random, num_points) for num_points in (2, 3, 6, 6)]
    for (sizes, seconds), line in zip(points, grade.call(m.fit, points), strict=True):
        _check_line(line, sizes, seconds)


@task("1.8")
def test_neither_coefficient_is_negative(grade: Grade) -> None:
    points = [_of_kind(grade.random, kind) for kind in ("no α", "no β", "no α", "no β")]
    points += [([1000, 2000], [1e-6, 3e-6]), ([4, 4096], [3e-5, 2e-5]), ([0, 8], [2.0, 2.0])]
    for (sizes, seconds), line in zip(points, grade.call(m.fit, points), strict=True):
        _check_line(line, sizes, seconds)


def _noisy(random: Random, num_points: int) -> tuple[list[int], list[float]]:
    """Points off their line by up to 30 %, whose best line has no negative coefficient."""
    while True:
        alpha_s, beta = random.uniform(5e-6, 5e-5), random.uniform(1e-10, 1e-9)
        sizes = [4 * random.randrange(10**k, 3 * 10**k) for k in range(2, 2 + num_points)]
        sizes.append(sizes[0])  # the same size may be measured twice
        random.shuffle(sizes)
        seconds = [(alpha_s + size * beta) * random.uniform(0.7, 1.3) for size in sizes]
        line = best_line(sizes, seconds)
        if line[0] > 1e-6 and line[1] > 1e-11:
            return sizes, seconds


def _of_kind(random: Random, kind: str) -> tuple[list[int], list[float]]:
    """Points whose best line without negative coefficients has a coefficient of 0."""
    while True:
        sizes = [random.randrange(1000, 9000, 4) for _ in range(4)]
        seconds = [random.uniform(1e-6, 9e-6) for _ in sizes]
        alpha_s, beta = best_line(sizes, seconds)
        if (alpha_s == 0) == (kind == "no α") and (beta == float_info.min) == (kind == "no β"):
            return sizes, seconds


def _check_line(line: list[float], sizes: list[int], seconds: list[float]) -> None:
    alpha_s, beta = best_line(sizes, seconds)
    where = f"for {sizes} bytes in {in_us(seconds)}"
    got = f"α = {line[0]:.4g} s, β = {line[1]:.4g} s/byte"
    if beta == float_info.min:
        is_level = len(set(seconds)) == 1  # then rounding decides the sign
        most = 1e-12 * alpha_s / max(sizes) if is_level else 1e-300
        check(
            0 < line[1] <= most and 1 / line[1] < float("inf") and _is_near(line[0], alpha_s),
            f"{where}: larger messages were not slower, so β should be sys.float_info.min, and α "
            f"should be the mean of the times with weights 1 / seconds², which is {alpha_s:.4g} s; "
            f"got {got}.",
        )
        return
    if alpha_s == 0:
        check(
            line[0] == 0 and _is_near(line[1], beta),
            f"{where}: the best line has a negative α, so α should be 0, and β alone is fitted, "
            f"which gives {beta:.4g} s/byte; got {got}.",
        )
        return
    check(
        _is_near(line[0], alpha_s) and _is_near(line[1], beta),
        f"{where}: α should be {alpha_s:.4g} s, and β {beta:.4g} s/byte; got {got}. Minimize the "
        "relative errors: weight each point by 1 / seconds². np.polyfit squares its argument w: "
        "pass 1 / seconds to it.",
    )


def _is_near(got: float, wanted: float) -> bool:
    return abs(got - wanted) <= 1e-6 * abs(wanted)
