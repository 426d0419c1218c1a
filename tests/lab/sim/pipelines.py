"""Pipelines of equal stages on an ideal cluster, where only matrix products take time.

Neither messages (zero latency, unlimited bandwidth) nor memory-bound operations, such as the last
stage's loss, take any time, so a pipeline's idle time is due to its schedule alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from distlab.sim import Cluster, Simulated, simulate
from distlab.sim.hardware.cluster import GPU

# Whatever the schedule, torch keeps the inputs of all micro-batches for the whole step. To make
# these negligible, stages are narrow at both ends: 2 values per row, against 576 inside.
NARROW, WIDE, DEPTH, ROWS = 2, 64, 9, 8
MICRO_BATCH_BYTES = 4 * ROWS * WIDE * DEPTH  # activations kept for the backward pass

ENDLESS = 1e30
FLOPS_PER_S = 1e6
IDEAL_GPU = GPU("ideal", ENDLESS, ENDLESS, {"float32": FLOPS_PER_S}, {"float32": FLOPS_PER_S})

SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {  # schedule, stages per rank
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
}


@dataclass(frozen=True)
class Measured:
    """Measurements of one step of a pipeline.

    Attributes:
        idle_of_total: Idle fraction of the ranks' total time.
        in_flight: Each rank's peak activations, in units of one micro-batch in one stage.
    """

    idle_of_total: float
    in_flight: list[float]

    @property
    def idle_of_ideal(self) -> float:
        """The ratio of the ranks' idle time to their computing time."""
        return self.idle_of_total / (1 - self.idle_of_total)


def stage() -> nn.Sequential:
    inside = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEPTH - 1)]
    first, last = nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)
    return nn.Sequential(first, *inside, last)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def two_steps(schedule: str, micro_batches: int) -> list[tuple[float, float]]:
    """Run two steps of a pipeline over all ranks; return when each began and ended on this rank.

    The first step takes longer, because torch determines the shapes of all messages in it.
    """
    make, stages_per_rank = SCHEDULES[schedule]
    rank, size = dist.get_rank(), dist.get_world_size()
    count = size * stages_per_rank
    mine = [PipelineStage(stage(), k, count, torch.device("cpu")) for k in range(rank, count, size)]
    run = make(mine if stages_per_rank > 1 else mine[0], micro_batches, loss_fn=loss_of)
    # The first stage's backward pass is as long as the others' only if its input needs a gradient.
    x, target = (torch.ones(micro_batches * ROWS, NARROW).requires_grad_() for _ in range(2))
    times = []
    for _ in range(2):
        dist.barrier()
        start_s = time.perf_counter()
        if rank == size - 1:
            run.step(target=target.detach())
        else:
            run.step(*([x] if rank == 0 else []))
        times.append((start_s, time.perf_counter()))
        dist.barrier()
    return times


def measure(schedule: str, num_ranks: int, micro_batches: int) -> Measured:
    """Simulate a pipeline and measure its second step."""
    cluster = Cluster(
        1, num_ranks, gpu=IDEAL_GPU, latency_s=0.0, nvlink_bytes_per_s=ENDLESS, name="ideal"
    )
    run = simulate(two_steps, num_ranks, schedule, micro_batches, cluster=cluster)
    start_s = min(times[1][0] for times in run.results)
    end_s = max(times[1][1] for times in run.results)
    busy_s = computing_s(run, start_s, end_s)
    activations = [peak["activations"] for peak in run.trace.peak_by_category]
    return Measured(
        1 - busy_s / (num_ranks * (end_s - start_s)),
        [num_bytes / MICRO_BATCH_BYTES for num_bytes in activations],
    )


def computing_s(run: Simulated[Any], start_s: float, end_s: float) -> float:
    """Return all ranks' total computing time between two moments."""
    spans = [(event.start_s, event.end_s) for event in run.trace.events if event.kind == "compute"]
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in spans)
