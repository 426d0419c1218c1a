"""What ranks agree on about their steps, and how often they do so."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from distlab.production.progress import Interval
from distlab.production.telemetry import steps_in
from phase4_production.given import StepTimes

pytestmark = pytest.mark.usefixtures("fast_ranks")


def told(sizes: list[list[int]]) -> Any:
    """Record steps with a loss of 1 + rank per image, and 1 + rank bad images; sum over ranks."""
    rank, interval = dist.get_rank(), Interval(torch.device("cpu"))
    for number in sizes[rank]:
        interval.add(torch.tensor(number * (1.0 + rank)), number)
        interval.add_times(StepTimes(2.0 + rank, 0.0, 0.0, 0.0), is_exact=True)
    return interval.of_all_ranks(rank + 1)


@pytest.mark.parametrize(
    ("sizes", "loss"),
    [
        ([[4, 4]], 1.0),
        ([[4, 4], [4, 4]], 1.5),
        ([[6, 6], [2, 2]], 1.25),  # the mean over samples, not over ranks
        ([[], [3], [1]], 2.25),  # rank 0 is a parameter server
        ([[]] * 5, 0.0),
    ],
)
def test_ranks_know_the_mean_loss_and_step_and_the_sum_of_bad_images(
    sizes: list[list[int]], loss: float
) -> None:
    size = len(sizes)
    seconds = sum(2.0 + rank for rank in range(size) if sizes[rank]) / size
    found = on_ranks(told, size, sizes, backend="sim")
    assert found == [(pytest.approx(loss), pytest.approx(seconds), size * (size + 1) // 2)] * size
    assert len(set(found)) == 1, "the same bits: what follows from it is the same on all ranks"


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.0, 10), (0.027, 10), (0.1, 10), (0.3, 3), (0.6, 1), (30.0, 1)]
)
def test_short_steps_are_not_followed_by_an_agreement_each(step_s: float, steps: int) -> None:
    assert steps_in(1.0, step_s) == steps


def test_an_agreement_may_be_wanted_after_each_step() -> None:
    assert steps_in(0.0, 0.001) == 1
