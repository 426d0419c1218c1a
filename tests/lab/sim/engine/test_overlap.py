"""Concurrent collectives slow computation down only if the options say so."""

import pytest
import torch
import torch.distributed as dist

from distlab.sim import GPU, Cluster, Options, simulate

MS = 1e-3
CORE = GPU("core", 1e12, 1e30, {"float32": 1e12}, {"float32": 1e12})
WORLD = Cluster(1, 2, gpu=CORE, nvlink_bytes_per_s=1e9, latency_s=0.0)
FLOPS_PER_MS, BYTES_PER_MS = 1e9, 1_000_000


def compute(ms: float) -> None:
    """Spend ``ms`` milliseconds multiplying a row by a matrix."""
    n = round(ms * FLOPS_PER_MS / 2 / 1000)
    torch.empty(1, 1000, device="meta") @ torch.empty(1000, n, device="meta")


def overlaps(collective_ms: float, computing_ms: tuple[float, ...]) -> None:
    x = torch.empty(round(collective_ms * BYTES_PER_MS / 4), device="meta")
    work = dist.all_reduce(x, async_op=True)
    for ms in computing_ms:
        compute(ms)
    work.wait()


def seconds(cost: float, collective_ms: float, *computing_ms: float) -> float:
    options = Options(algorithm="ring", overlap_cost=cost)
    run = simulate(overlaps, 2, collective_ms, computing_ms, cluster=WORLD, options=options)
    return run.seconds


@pytest.mark.parametrize(
    ("cost", "collective_ms", "computing_ms", "expected_ms"),
    [
        (0.0, 1.0, (2.0,), 2.0),
        (0.5, 1.0, (2.0,), 2.5),  # loses half of the millisecond during which both run
        (0.5, 1.0, (0.5, 0.5, 1.0), 2.5),  # the same if it is computed in pieces
        (0.5, 1.0, (0.5,), 1.0),  # ends at 0.75 ms, before the collective
        (0.5, 1.0, (0.9,), 1.35),  # overlaps throughout, so half of its 0.9 ms is lost
        (0.5, 1.0, (), 1.0),
    ],
)
def test_computation_beside_a_collective_takes_longer(
    cost: float, collective_ms: float, computing_ms: tuple[float, ...], expected_ms: float
) -> None:
    assert seconds(cost, collective_ms, *computing_ms) == pytest.approx(expected_ms * MS, rel=1e-6)


def overlaps_with_several(collectives: int) -> None:
    x = torch.empty(round(BYTES_PER_MS / 4), device="meta")
    works = [dist.all_reduce(x, async_op=True) for _ in range(collectives)]
    compute(3.0)
    for work in works:
        work.wait()


@pytest.mark.parametrize(("collectives", "expected_ms"), [(1, 3.5), (2, 4.0), (8, 8.0)])
def test_a_second_is_lost_once_however_many_collectives_share_it(
    collectives: int, expected_ms: float
) -> None:
    options = Options(algorithm="ring", overlap_cost=0.5)
    run = simulate(overlaps_with_several, 2, collectives, cluster=WORLD, options=options)
    assert run.seconds == pytest.approx(expected_ms * MS, rel=1e-6)
