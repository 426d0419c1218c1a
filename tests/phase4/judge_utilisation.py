"""Judges task 4.15: rates of the job, FLOPs that are counted, and peaks of memory."""

from collections.abc import Sequence

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import joined, verb
from judging.checks import MEASURED, of_members
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import utilisation as b
from phase4.judge_steps import check_small

STUCK = "All ranks put their numbers together, by collectives that all of them call."
MIB = 2**20


def _samples(grade: Grade, num_ranks: int) -> list[tuple[int, float]]:
    return [
        (grade.random.randrange(1, 4000), grade.random.uniform(0.5, 3)) for _ in range(num_ranks)
    ]


def _check_throughput(by_rank: Sequence[float], given: Sequence[tuple[int, float]]) -> None:
    samples, times_s = zip(*given, strict=True)
    right = sum(samples) / max(times_s)
    for rank, found in enumerate(by_rank):
        check(
            abs(found - right) <= 1e-12 * right,
            f"ranks have processed {[*samples]} samples in {[round(t, 4) for t in times_s]} s: "
            f"{right:.10g} samples/s, all samples over the time of the slowest rank, or of the "
            f"only one; rank {rank} of {len(given)} says {found:.10g}. A mean or a sum of the "
            "ranks' own rates is not the rate of the job, and float32 rounds.",
        )


@task("4.15", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_samples_of_all_ranks_over_the_time_of_the_slowest(grade: Grade, num_ranks: int) -> None:
    given = _samples(grade, num_ranks)
    run = grade.run(b.rate, num_ranks, "throughput", given, if_stuck=STUCK)
    _check_throughput(run.results, given)


@task("4.15")
def test_throughput_of_uneven_ranks(grade: Grade) -> None:
    slowest_has_nothing = [(300, 1.0), (0, 2.5), (100, 2.0)]
    _check_throughput(
        grade.run(b.rate, 3, "throughput", slowest_has_nothing, if_stuck=STUCK).results,
        slowest_has_nothing,
    )
    nobody_has_any = [(0, 1.0), (0, 0.5)]
    _check_throughput(
        grade.run(b.rate, 2, "throughput", nobody_has_any, if_stuck=STUCK).results, nobody_has_any
    )
    many = [(2**24 + 1 + 2 * rank, 1.0) for rank in range(3)]  # float32 has no odd number so large
    _check_throughput(grade.run(b.rate, 3, "throughput", many, if_stuck=STUCK).results, many)


@task("4.15")
@pytest.mark.parametrize("num_ranks", [1, 5, 8])
def test_throughput_costs_two_small_collectives(grade: Grade, num_ranks: int) -> None:
    given = _samples(grade, num_ranks)
    run = grade.run(b.rate, num_ranks, "throughput", given, options=MEASURED, if_stuck=STUCK)
    _check_throughput(run.results, given)
    check_small(run, 2, 16, "throughput")


def _works(grade: Grade, num_ranks: int) -> list[tuple[float, float, float]]:
    draw = grade.random.uniform
    return [(draw(1e12, 4e12), draw(0.01, 0.02), draw(5e14, 1e15)) for _ in range(num_ranks)]


def _check_mfu(by_rank: Sequence[float], given: Sequence[tuple[float, float, float]]) -> None:
    flops, times_s, peaks = zip(*given, strict=True)
    right = sum(flops) / (max(times_s) * sum(peaks))
    for rank, found in enumerate(by_rank):
        check(
            abs(found - right) <= 1e-12 * right,
            f"ranks with {[f'{f:.4g}' for f in flops]} FLOPs in {[round(t, 5) for t in times_s]} s "
            f"on devices of {[f'{p:.4g}' for p in peaks]} FLOP/s use {right:.10g} of them: all "
            "FLOPs, over the time of the slowest rank times the sum of all peaks. Rank "
            f"{rank} of {len(given)} says {found:.10g}.",
        )


@task("4.15", real=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_utilisation_of_all_devices(grade: Grade, num_ranks: int) -> None:
    given = _works(grade, num_ranks)
    _check_mfu(grade.run(b.rate, num_ranks, "mfu", given, if_stuck=STUCK).results, given)


@task("4.15")
@pytest.mark.parametrize("num_ranks", [1, 5, 8])
def test_utilisation_costs_two_small_collectives(grade: Grade, num_ranks: int) -> None:
    given = _works(grade, num_ranks)
    given[-1] = (0.0, *given[-1][1:])  # no samples, but a device that could have computed
    run = grade.run(b.rate, num_ranks, "mfu", given, options=MEASURED, if_stuck=STUCK)
    _check_mfu(run.results, given)
    check_small(run, 2, 24, "mfu")


@task("4.15")
def test_rates_inside_a_group(grade: Grade) -> None:
    samples, works = _samples(grade, 3), _works(grade, 3)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.rate, "throughput", samples), if_stuck=STUCK_IN_GROUP
    )
    _check_throughput(of_members(run), samples)
    run = grade.run(
        *(inside_group, OUTER_WORLD_SIZE, b.rate, "mfu", works), if_stuck=STUCK_IN_GROUP
    )
    _check_mfu(of_members(run), works)


def _check_count(grade: Grade, kind: str, sizes: Sequence[int], right: int, why: str) -> None:
    found = grade.call(b.count, kind, sizes)
    check(
        found["calls"] == 1,
        f"count_flops should call step once; it called it {found['calls']} times.",
    )
    check(
        found["flops"] == right,
        f"{kind}, with the sizes {[*sizes]}: a step takes {right:,} FLOPs, {why}; count_flops says "
        f"{found['flops']:,} ({found['flops'] / right:.3g} times as many).",
    )
    check(
        not found["other"],
        f"{kind}: a step that is counted should leave all as one that is not does; after it, "
        f"{joined(found['other'])} {verb(found['other'], 'are', 'is')} other than after the step "
        "alone. Let the step do what it does: one whose random numbers are put back drops the same "
        "activations as the one before.",
    )
    check(
        not found["printed"],
        f"count_flops should print nothing; it printed {found['printed'][:60]!r}. "
        "FlopCounterMode prints a table unless display=False.",
    )


@task("4.15")
def test_operations_of_a_step_are_counted(grade: Grade) -> None:
    m, k, h, n = sizes = grade.random.sample(range(2, 40), 4)
    first, second = 2 * m * k * h, 2 * m * h * n
    for kind, right, why in (
        (
            "trained",
            2 * first + 3 * second,
            "2·m·k·n for each layer's forward pass and for each of its gradients, but none for the "
            "gradient of the data",
        ),
        (
            "frozen first layer",
            first + 3 * second - second,
            "because neither frozen weights nor what lies below them need a gradient",
        ),
        (
            "frozen last layer",
            2 * first + 2 * second,
            "because frozen weights need no gradient, but what lies below them does",
        ),
        ("forward only", first + second, "because there is no backward pass"),
        (
            "recomputed",
            2 * first + 3 * second + first,
            "because the backward pass computes the forward pass again, up to the last tensor that "
            "it needs",
        ),
    ):
        _check_count(grade, kind, sizes, right, why)


@task("4.15")
def test_convolutions_are_counted(grade: Grade) -> None:
    m, channels, filters, width = sizes = grade.random.sample(range(4, 12), 4)
    forward = 2 * m * width**2 * filters * channels * 9
    why = "once for the output of the convolution and once for the gradient of its weight"
    _check_count(grade, "convolution", sizes, 2 * forward, why)


@task("4.15")
def test_the_peak_of_the_process(grade: Grade) -> None:
    found = grade.call(b.process_memory)
    low, high = found["bounds"]
    check(
        0.97 * low <= found["told"] <= 1.03 * high,
        f"the most that the process has held in memory is between {low / MIB:.0f} and "
        f"{high / MIB:.0f} MiB; peak_memory_bytes says {found['told'] / MIB:.3g} MiB. "
        "ru_maxrss of the process itself is the peak, not what it holds now; Linux "
        "counts it in KiB, macOS in bytes.",
    )


@task("4.15")
def test_the_peak_of_a_gpu(grade: Grade) -> None:
    index, num_bytes = grade.random.randrange(1, 8), grade.random.randrange(10**9, 10**10)
    found = grade.call(b.gpu_memory, index, num_bytes)
    check(
        found == num_bytes + index,
        f"torch.cuda.max_memory_allocated says {num_bytes + index:,} for GPU {index}; "
        f"peak_memory_bytes of this device says {found!r}. Pass the device on: without it, torch "
        "tells of the current one.",
    )
