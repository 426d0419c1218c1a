"""Bodies for task 2.12, and a pipeline on an ideal cluster."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim import Cluster
from distlab.sim.cluster import GPU
from judging.calls import numbers, refusal_of
from phase2.drawings import drawn
from phase2.pipeline_models import block, gradients_of, loss_of, micro_batch
from phase2_advanced.given import Batch

CALLS = 2


Case = tuple[str, Sequence[int], str]  # a schedule as drawn; rows of micro-batches; kind of model


def run_pipelines(lesson: Any, cases: Sequence[Case], group: Any = None) -> list[dict[str, Any]]:
    """For each case: loss and gradients of this rank's blocks, after the second of two calls."""
    return [_run_pipeline(lesson, *case, group) for case in cases]


def _run_pipeline(
    lesson: Any, text: str, sizes: Sequence[int], kind: str, group: Any
) -> dict[str, Any]:
    chunks, batches = _mine(text, sizes, kind, group)
    given = {} if group is None else {"group": group}
    for _ in range(CALLS):
        loss = lesson.run_schedule(drawn(text), chunks, batches, loss_of(kind), **given)
    (number,) = numbers("run_schedule", [loss], ["mean loss"])
    return {"loss": number, "gradients": [gradients_of(chunk) for chunk in chunks]}


def _mine(text: str, sizes: Sequence[int], kind: str, group: Any) -> tuple[list[nn.Module], Any]:
    """This rank's blocks, and of the micro-batches what it may read."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    v = 1 + max(action.chunk for actions in drawn(text) for action in actions)
    chunks = [block(chunk * p + rank, v * p, kind) for chunk in range(v)]
    batches = [micro_batch(*one, kind) for one in enumerate(sizes)]
    return chunks, [_seen(batch, rank == 0, rank == p - 1) for batch in batches]


def _seen(batch: Batch, is_first: bool, is_last: bool) -> tuple[Tensor | None, ...]:
    inputs, *rest = batch
    return (inputs if is_first else None, *(one if is_last else None for one in rest))


def refusals(lesson: Any, texts: Sequence[str], num_micro_batches: int) -> list[dict[str, str]]:
    """How schedules are refused that are none for these micro-batches and one chunk a rank."""
    chunks = [block(dist.get_rank(), dist.get_world_size())]
    batches = [micro_batch(i, 3 + i) for i in range(num_micro_batches)]
    return [
        refusal_of(lambda text=text: lesson.run_schedule(drawn(text), chunks, batches, loss_of("")))
        for text in texts
    ]


# An ideal cluster: only matrix products take time. Blocks are wide inside and narrow between.

NARROW, WIDE, DEPTH, ROWS = 2, 64, 5, 8
BLOCK_BYTES = 4 * ROWS * WIDE * DEPTH  # the activations of one micro-batch in one block
BLOCK_FLOPS = 2 * ROWS * WIDE * (2 * NARROW + WIDE * (DEPTH - 1))  # of a forward pass
ENDLESS, FLOPS_PER_S = 1e30, 1e6
SPEED = {"float32": FLOPS_PER_S}
IDEAL_GPU = GPU("ideal", ENDLESS, ENDLESS, SPEED, SPEED)


def ideal(num_ranks: int) -> Cluster:
    return Cluster(
        1, num_ranks, gpu=IDEAL_GPU, latency_s=0.0, nvlink_bytes_per_s=ENDLESS, name="ideal"
    )


class Shift(nn.Module):
    """Adds a parameter: so the backward pass of the first block is as long as the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(NARROW))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def _wide_block() -> nn.Sequential:
    inside = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEPTH - 1)]
    ends = nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)
    return nn.Sequential(Shift(), ends[0], *inside, ends[1])


def _squares(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[1])


def run_ideal(lesson: Any, text: str, num_micro_batches: int, num_chunks: int) -> float:
    """Run a pipeline of equal blocks once; return the loss."""
    torch.manual_seed(dist.get_rank())
    chunks = [_wide_block() for _ in range(num_chunks)]
    batches = [(torch.ones(ROWS, NARROW),) * 2 for _ in range(num_micro_batches)]
    loss = lesson.run_schedule(drawn(text), chunks, batches, _squares)
    return numbers("run_schedule", [loss], ["mean loss"])[0]
