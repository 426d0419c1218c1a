"""Judges task 4.15: rates of the job, FLOPs that are counted, and peaks of memory."""

from collections.abc import Callable, Sequence

import pytest

from distlab.grade import Grade, check, task
from distlab.util.text import joined, verb
from judging.expect import check_small, expect, results_in_group
from phase4 import utilisation as b

STUCK = "All ranks put their numbers together, by collectives that all of them call."
MIB = 2**20
Given = Sequence[tuple[float, ...]]  # arguments by rank


# Rates: throughput(num_samples, seconds) and mfu(flops, step_s, peak_flops_per_s)

CAUSES = {
    "throughput": "All samples over the time of the slowest rank, or of the only one. A mean or a "
    "sum of the ranks' own rates is not the rate of the job, and float32 rounds.",
    "mfu": "All FLOPs, over the time of the slowest rank times the sum of all peaks; float32 "
    "rounds.",
}
BYTES = {"throughput": 16, "mfu": 24}  # contribution of a rank


def _draw(grade: Grade, function: str) -> Given:
    draw = grade.random.uniform
    if function == "throughput":
        return [(grade.random.randrange(1, 4000), draw(0.5, 3)) for _ in range(3)]
    return [(draw(1e12, 4e12), draw(0.01, 0.02), draw(5e14, 1e15)) for _ in range(3)]


def _check_rate(by_rank: Sequence[float], function: str, given: Given) -> None:
    work, _, *peaks = (sum(column) for column in zip(*given, strict=True))
    right = work / (max(times_s for _, times_s, *_ in given) * (peaks[0] if peaks else 1))
    for rank, rate in enumerate(by_rank):
        where = f"ranks call {function} with {[*given]}: the result on rank {rank}"
        expect(where, rate, right, CAUSES[function], 1e-12 * right)


@task("4.15", real=True)
@pytest.mark.parametrize("function", CAUSES)
def test_the_rate_of_the_job(grade: Grade, function: str) -> None:
    given = _draw(grade, function)
    run = grade.run(b.rate, len(given), function, given, if_stuck=STUCK)
    _check_rate(run.results, function, given)
    if grade.is_simulated:
        check_small(run, 2, BYTES[function], function)


UNEVEN: Sequence[tuple[str, Given]] = (
    ("throughput", [(300, 1.5)]),
    ("throughput", [(300, 1.0), (0, 2.5), (100, 2.0)]),  # the slowest rank has nothing
    ("throughput", [(0, 1.0), (0, 0.5)]),
    ("throughput", [(2**24 + 1 + 2 * rank, 1.0) for rank in range(3)]),  # not in float32
    ("mfu", [(1e12, 0.01, 1e15), (0.0, 0.01, 5e14)]),  # a device that could have computed
)


@task("4.15")
@pytest.mark.parametrize(("function", "given"), UNEVEN)
def test_rates_of_uneven_ranks(grade: Grade, function: str, given: Given) -> None:
    run = grade.run(b.rate, len(given), function, given, if_stuck=STUCK)
    _check_rate(run.results, function, given)


@task("4.15")
@pytest.mark.parametrize("function", CAUSES)
def test_rates_inside_a_group(grade: Grade, function: str) -> None:
    given = _draw(grade, function)
    _check_rate(results_in_group(grade, b.rate, function, given), function, given)


# FLOPs


COUNTS: dict[str, tuple[Callable[..., int], str]] = {  # kind -> FLOPs for its sizes, and the reason
    "trained": (
        lambda m, k, h, n: 4 * m * k * h + 6 * m * h * n,
        "2·m·k·n for each layer's forward pass and for each of its gradients, but none for the "
        "gradient of the data",
    ),
    "forward only": (
        lambda m, k, h, n: 2 * m * k * h + 2 * m * h * n,
        "because there is no backward pass",
    ),
    "recomputed": (
        lambda m, k, h, n: 6 * m * k * h + 6 * m * h * n,
        "because the backward pass computes the forward pass again, up to the last tensor that it "
        "needs",
    ),
    "convolution": (
        lambda m, channels, filters, width: 4 * m * width**2 * filters * channels * 9,
        "once for the output of the convolution and once for the gradient of its weight",
    ),
}


@task("4.15")
@pytest.mark.parametrize("kind", COUNTS)
def test_operations_of_a_step_are_counted(grade: Grade, kind: str) -> None:
    sizes, (right, why) = grade.random.sample(range(4, 12), 4), COUNTS[kind]
    facts = grade.call(b.count, kind, sizes)
    expect("the number of times that count_flops calls step", facts["calls"], 1)
    expect(f"{kind}, with the sizes {sizes}: the FLOPs", facts["flops"], right(*sizes), why)
    check(
        not facts["other"],
        f"{kind}: a step that is counted should leave all as one that is not does; after it, "
        f"{joined(facts['other'])} {verb(facts['other'], 'are', 'is')} other than after the step "
        "alone. Let the step do what it does: one whose random numbers are put back drops the same "
        "activations as the one before.",
    )
    check(
        not facts["printed"],
        f"count_flops should print nothing; it printed {facts['printed'][:60]!r}. "
        "FlopCounterMode prints a table unless display=False.",
    )


# Memory


@task("4.15")
def test_the_peak_of_the_process(grade: Grade) -> None:
    low, peak, high = grade.call(b.process_memory)
    check(
        0.97 * low <= peak <= 1.03 * high,
        f"the most that the process has held in memory is between {low / MIB:.0f} and "
        f"{high / MIB:.0f} MiB; peak_memory_bytes says {peak / MIB:.3g} MiB. ru_maxrss of the "
        "process itself is the peak, not what it holds now; Linux counts it in KiB, macOS in "
        "bytes.",
    )


@task("4.15")
def test_the_peak_of_a_gpu(grade: Grade) -> None:
    index, num_bytes = grade.random.randrange(1, 8), grade.random.randrange(10**9, 10**10)
    expect(
        f"the peak of GPU {index}, of which torch.cuda.max_memory_allocated says "
        f"{num_bytes + index},",
        *(grade.call(b.gpu_memory, index, num_bytes), num_bytes + index),
        "Pass the device on: without it, torch answers for the current one.",
    )
