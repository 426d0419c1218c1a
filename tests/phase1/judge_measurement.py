"""Judges task 1.8: all-reduce times, their table, and the line fitted to points."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import product, starmap
from math import prod
from random import Random
from statistics import median_high, median_low
from sys import float_info
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Cluster
from judging.checks import ON_CPU, UNIFORM, check_refused, edges_with, short
from judging.expect import expect, results_in_group
from phase1 import collectives as m

DEFAULT_REPEATS = 5
NO_COMMON_CALLS = (
    "Do all ranks take the same branches, whatever they measure? All ranks must call the same "
    "strategies and all-reduces, each the same number of times."
)

# The table


@task("1.8")
@pytest.mark.parametrize("n", [2, 4])
def test_the_table_and_the_line_are_those_of_the_link(grade: Grade, n: int) -> None:
    alpha_s, bandwidth = grade.random.uniform(5e-6, 5e-5), grade.random.uniform(5e9, 5e10)
    sizes = [4 * grade.random.randrange(10**k, 2 * 10**k) for k in (2, 3, 4, 5)]
    grade.random.shuffle(sizes)
    names = [f"{name}_{grade.random.randrange(1000)}" for name in ("a", "b")]
    functions = dict(zip(names, ("all_reduce_naive", "all_reduce_recursive_doubling"), strict=True))
    link = Cluster(1, 8, latency_s=alpha_s, nvlink_bytes_per_s=bandwidth)
    run = grade.run(
        *(m.measure, n, partial(m.its_own, functions), sizes, {"repeats": 3}),
        cluster=link,
        if_stuck=NO_COMMON_CALLS,
    )
    # Number of messages, one after another, in a run of exchange and of each strategy.
    messages = {2: (1, 2, 1), 4: (1, 5, 2)}[n]
    for rank, table in enumerate(run.results):
        _check_names(table, [*names, "exchange"], sizes, rank)
        for name, num_messages in zip(["exchange", *names], messages, strict=True):
            expected = [num_messages * (alpha_s + size / bandwidth) for size in sizes]
            got = table["seconds"][name]
            check(
                len(got) == len(expected) and are_close(got, expected, 0.01),
                f"{name}, rank {rank} of {n}: at {sizes} bytes it takes {in_us(expected)}, but you "
                f"measured {in_us(got)}. Is each run timed by itself, from a common start, in "
                "seconds, with time.perf_counter? Does the tensor have bytes / 4 elements?",
            )
        _check_line_of_exchange(table)


def _check_names(table: dict[str, Any], names: list[str], sizes: list[int], rank: int) -> None:
    found = [sorted(table["seconds"]), table["sizes"]]
    expect(f"rank {rank}: the columns and sizes of the table", found, [sorted(names), sizes])


def _check_line_of_exchange(table: dict[str, Any]) -> None:
    alpha_s, beta = best_line(table["sizes"], table["seconds"]["exchange"])
    got, wanted = [table["alpha_s"], table["bandwidth"]], [alpha_s, 1 / beta]
    check(
        are_close(got, wanted, 1e-3),
        f"the line through the column exchange, {in_us(table['seconds']['exchange'])} at "
        f"{table['sizes']} bytes, has α and 1/β = {short(wanted)}; yours are {short(got)}. Pass "
        "the sizes in bytes and the times of this column in seconds to fit_alpha_beta.",
    )


@task("1.8", real=True)
def test_all_ranks_have_the_same_table(grade: Grade) -> None:
    args = partial(m.its_own, {"naive": "all_reduce_naive"}), (4000, 4), {}
    if grade.is_simulated:
        tables = results_in_group(grade, m.measure, *args)
    else:
        tables = grade.run(m.measure, 2, *args, if_stuck=NO_COMMON_CALLS).results
    for rank, table in enumerate(tables):
        _check_names(table, ["exchange", "naive"], [4000, 4], rank)
        check(
            table == tables[0],
            f"rank {rank} has a different table from rank 0: {short(table['seconds'])} instead of "
            f"{short(tables[0]['seconds'])}. Share the times of all ranks before you take the "
            "slowest.",
        )


# Calls


@task("1.8")
def test_every_cell_runs_once_more_than_it_is_timed(grade: Grade) -> None:
    sizes = [4 * size for size in grade.random.sample(range(30_000, 60_000), 2)]
    sizes.insert(1, 4 * grade.random.randrange(270_000, 300_000))  # more than 2^20 bytes
    sizes += [sizes[0], 0]
    for arguments in {}, {"repeats": grade.random.choice([1, 3, 7])}:
        run = grade.run(m.measure_counting, 3, ["a", "b"], sizes, arguments, options=ON_CPU)
        runs = 1 + arguments.get("repeats", DEFAULT_REPEATS)
        _check_calls(run.results, sizes, runs)
        _check_exchanges(run, sizes, runs)


def _check_calls(by_rank: Sequence[Any], sizes: list[int], runs: int, device: str = "cpu") -> None:
    for rank, calls in enumerate(by_rank):
        for name, found in calls.items():
            here = f"rank {rank}, strategy {name} with {runs - 1} timed runs for each entry of "
            got, wanted = (Counter(row) for row in ([size for size, *_ in found], sizes * runs))
            expect(
                f"{here}sizes_bytes = {sizes}: the numbers of runs by size in bytes",
                sorted(got.items()),
                sorted(wanted.items()),
                "The first run of each is not timed.",
            )
            for _, *given in found:
                expect(
                    f"{here}sizes_bytes: dtype and device of its tensor, and ranks of its group,",
                    given,
                    ["float32", device, len(by_rank)],
                    "Pass on device= and group.",
                )


def _check_exchanges(run: Run, sizes: list[int], runs: int) -> None:
    n = len(run.results)
    for size in {*sizes} - {0}:
        ring = {(rank, (rank + 1) % n): runs * sizes.count(size) for rank in range(n)}
        expect(
            f"the messages of {size} bytes, by (from, to), of the column exchange, in which each "
            f"rank sends {runs} times to its right neighbour for each entry of sizes_bytes,",
            sorted(edges_with(run, size).items()),
            sorted(ring.items()),
        )


@task("1.8")
def test_the_group_alone_is_measured(grade: Grade) -> None:
    sizes = [4 * size for size in grade.random.sample(range(1, 2000), 3)]
    arguments = ["a"], sizes, {"repeats": 2}
    by_rank = results_in_group(grade, m.measure_counting, *arguments, options=ON_CPU)
    _check_calls(by_rank, sizes, 3)


@task("1.8")
def test_the_tensors_are_on_the_device(grade: Grade) -> None:
    sizes = [4 * size for size in grade.random.sample(range(1, 2000), 2)]
    results = grade.run(m.measure_elsewhere, 2, sizes, options=ON_CPU).results
    device = results[0]["device"]
    _check_calls([{"a": found["calls"]} for found in results], sizes, 3, device)
    for rank, found in enumerate(results):
        expect(
            f"rank {rank}, with device={device}: the devices of the tensors that are sent",
            found["sent"],
            [device],
            "NCCL only sends tensors on GPUs.",
        )


@task("1.8")
def test_measurements_that_cannot_be_fitted_are_refused(grade: Grade) -> None:
    for body, n in (m.measure_nonsense, 2), (m.measure_nonsense, 1), (m.measure_alone, 2):
        by_rank = grade.run(body, n, if_stuck=NO_COMMON_CALLS).results
        for what in by_rank[0]:
            check_refused([found[what] for found in by_rank], what, text="same")


# Times


@task("1.8")
def test_a_run_ends_when_the_device_has_finished(grade: Grade) -> None:
    seconds = round(grade.random.uniform(1, 9), 2)
    for rank, got in enumerate(grade.run(m.measure_unfinished, 2, seconds, options=ON_CPU).results):
        check(
            are_close(got, [seconds] * 2, 0.001),
            f"rank {rank} of 2: the strategy returns at once, but the GPU works for {seconds} s "
            f"more; you measured {short(got)} s. Call finish before you read the clock again.",
        )


@task("1.8")
def test_all_ranks_start_each_run_together(grade: Grade) -> None:
    order, seconds = [0, 1, 2], round(grade.random.uniform(1, 9), 2)
    grade.random.shuffle(order)
    orders = {f"begins_{order[i]}": order[i:] + order[:i] for i in range(3)}
    args = partial(m.chains, orders, seconds), (4, 4000), {"repeats": 4}
    for rank, table in enumerate(grade.run(m.measure, 3, *args, options=ON_CPU).results):
        for name in orders:
            got = table["seconds"].get(name, [])
            check(
                len(got) == 2 and are_close(got, [2 * seconds] * 2, 0.001),
                f"rank {rank} of 3: two ranks that sleep {seconds} s, one after the other, take "
                f"{2 * seconds} s; you measured {short(got)} s. All ranks must start each run "
                "together: no rank may begin before all the others are ready.",
            )


@task("1.8")
@pytest.mark.parametrize("repeats", [1, 4, 5])
def test_the_slowest_rank_counts_in_the_median_run(grade: Grade, repeats: int) -> None:
    sizes = [4 * size for size in grade.random.sample(range(1, 2000), 2)]
    schedules = {name: [_drawn(grade.random, repeats) for _ in sizes] for name in ("a", "b")}
    args = partial(m.sleepers, schedules, sizes), sizes, {"repeats": repeats}
    run = grade.run(m.measure, 3, *args, cluster=UNIFORM)
    for (rank, table), (name, schedule) in product(enumerate(run.results), schedules.items()):
        found = table["seconds"].get(name, [])
        expect(f"rank {rank}: the number of times for strategy {name}", len(found), len(sizes))
        for got, times in zip(found, schedule, strict=True):
            slowest = [max(run) for run in zip(*times, strict=True)]
            low, high = median_low(slowest[1:]), median_high(slowest[1:])
            check(
                0.999 * low <= got <= 1.001 * high,
                f"rank {rank} of 3: the slowest rank took {slowest[1:]} s in the timed runs, after "
                f"a first one of {slowest[0]} s, so the median is {low} to {high} s; you measured "
                f"{got:.4g} s. Take the slowest rank of every run, whichever that is, and then the "
                "median, not the mean. Do not time the first run, which opens the connections. "
                "time.perf_counter runs while a rank sleeps, time.process_time does not.",
            )


def _drawn(random: Random, repeats: int) -> list[list[float]]:
    """Draw widely varying seconds for each rank and run, plus a first run that does not count."""
    return [[round(10 ** random.uniform(0, 2), 2) for _ in range(repeats + 1)] for _ in range(3)]


# The line through points


@task("1.8")
def test_the_line_through_points_has_no_negative_coefficient(grade: Grade) -> None:
    points = [([0, 1000, 2000], [5e-6, 6e-6, 7e-6])]
    points += [_noisy(grade.random, num_points) for num_points in (2, 3, 6)]
    points += [_of_kind(grade.random, kind) for kind in ("no α", "no β", "no α", "no β")]
    points += [([1000, 2000], [1e-6, 3e-6]), ([4, 4096], [3e-5, 2e-5]), ([0, 8], [2.0, 2.0])]
    for (sizes, seconds), line in zip(points, grade.call(m.fit, points), strict=True):
        _check_line(line, sizes, seconds)


def _noisy(random: Random, num_points: int) -> tuple[list[int], list[float]]:
    """Draw points up to 30 % off a line, whose best line has two positive coefficients."""
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
    """Draw points whose best line without negative coefficients lacks one of them.

    It lacks α if ``kind`` is "no α", and β if ``kind`` is "no β".
    """
    while True:
        sizes = [random.randrange(1000, 9000, 4) for _ in range(4)]
        seconds = [random.uniform(1e-6, 9e-6) for _ in sizes]
        alpha_s, beta = best_line(sizes, seconds)
        if (alpha_s == 0) == (kind == "no α") and (beta == float_info.min) == (kind == "no β"):
            return sizes, seconds


def _check_line(line: list[float], sizes: list[int], seconds: list[float]) -> None:
    alpha_s, beta = best_line(sizes, seconds)
    is_right = are_close(line, [alpha_s, beta], 1e-6)
    cause = (
        "Minimize the relative errors: weight each point by 1 / seconds². np.polyfit squares its "
        "argument w: pass 1 / seconds to it."
    )
    if beta == float_info.min:
        is_level = len(set(seconds)) == 1  # if so, rounding decides the sign of the slope
        most = 1e-12 * alpha_s / max(sizes) if is_level else 1e-300
        is_right = 0 < line[1] <= most and 1 / line[1] < float("inf")
        is_right = is_right and are_close(line[:1], [alpha_s], 1e-6)
        cause = (
            "Larger messages were not slower, so β should be sys.float_info.min, and α the mean of "
            "the times with weights 1 / seconds²."
        )
    elif alpha_s == 0:
        cause = "The best line has a negative α, so α should be 0, and β alone is fitted."
    check(
        is_right,
        f"for {sizes} bytes in {in_us(seconds)}: α should be {alpha_s:.4g} s, and β {beta:.4g} "
        f"s/byte; got α = {line[0]:.4g} s, β = {line[1]:.4g} s/byte. {cause}",
    )


Line = tuple[float, float]  # α, β


def best_line(sizes: list[int], seconds: list[float]) -> Line:
    """Return the line without negative coefficients that minimizes the squared relative errors."""
    n, t = [Fraction(size) for size in sizes], [Fraction(second) for second in seconds]

    def weighted(*factors: list[Fraction]) -> Fraction:
        return sum((prod(row) / s**2 for s, *row in zip(t, *factors, strict=True)), Fraction(0))

    w0, wn, wt, wnn, wnt = starmap(weighted, ((), (n,), (t,), (n, n), (n, t)))
    beta = (w0 * wnt - wn * wt) / (w0 * wnn - wn**2)
    alpha_s = (wt - beta * wn) / w0
    if beta <= 0:
        return float(wt / w0), float_info.min
    return (0.0, float(wnt / wnn)) if alpha_s < 0 else (float(alpha_s), float(beta))


def are_close(got: list[float], expected: list[float], tolerance: float) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(abs(a - b) <= tolerance * b for a, b in pairs)


def in_us(seconds: list[float]) -> str:
    return f"[{', '.join(f'{second * 1e6:.4g}' for second in seconds)}] µs"
