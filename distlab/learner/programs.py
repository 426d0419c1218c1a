"""Small standard programs that show what a task's function sends, for ``distlab trace``.

Each runs on every rank with the learner's lesson as its argument.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUMBERS = 65_994  # of float32: the gradient of the CNN of `make demo`, as in guidelines.md
BATCH = 64  # images of 8 x 8


@dataclass(frozen=True)
class Program:
    """What to run, and on how many ranks the picture tells most."""

    body: Callable[[Any], None]
    ranks: int
    title: str  # {n} is the number of ranks


def exchange_round_a_ring(lesson: Any) -> None:
    """Every rank sends to its right neighbour and receives from its left one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lesson.exchange(_mine(), (rank + 1) % size, _mine(), (rank - 1) % size)


def broadcast_from_rank_0(lesson: Any) -> None:
    """Rank 0 has the data."""
    lesson.broadcast(_mine(), 0)


def all_reduce_naive(lesson: Any) -> None:
    """One all-reduce of a gradient."""
    lesson.all_reduce_naive(_mine())


def all_reduce_recursive_doubling(lesson: Any) -> None:
    """One all-reduce of a gradient."""
    lesson.all_reduce_recursive_doubling(_mine())


def scatter_a_batch(lesson: Any) -> None:
    """Rank 0 holds a global batch of small images."""
    batch = (torch.zeros(BATCH, 1, 8, 8), torch.zeros(BATCH, dtype=torch.int64))
    lesson.scatter_batch(batch if dist.get_rank() == 0 else None)


def broadcast_two_layers(lesson: Any) -> None:
    """The parameters of two layers, from rank 0."""
    lesson.broadcast_parameters(_two_layers())


def average_two_layers(lesson: Any) -> None:
    """The gradients of two layers, a message each."""
    module = _two_layers()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    lesson.average_gradients(module)


def _mine() -> Tensor:
    return torch.full((NUMBERS,), float(dist.get_rank()))


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10))


PROGRAMS: Mapping[str, Program] = {
    "scatter_batch": Program(scatter_a_batch, 4, f"scatter a batch of {BATCH} over {{n}} ranks"),
    "exchange": Program(exchange_round_a_ring, 4, "exchange round a ring of {n}"),
    "broadcast": Program(broadcast_from_rank_0, 8, "broadcast from rank 0 to {n} ranks"),
    "all_reduce_naive": Program(all_reduce_naive, 4, "naive all-reduce of {n} ranks"),
    "all_reduce_recursive_doubling": Program(
        all_reduce_recursive_doubling, 8, "recursive doubling of {n} ranks"
    ),
    "broadcast_parameters": Program(broadcast_two_layers, 4, "parameters to {n} ranks"),
    "average_gradients": Program(average_two_layers, 4, "gradients of {n} ranks"),
}
