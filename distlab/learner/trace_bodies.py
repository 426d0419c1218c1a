"""The programs of ``distlab trace``, as every rank runs them with the learner's lesson."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.learner.trace_programs import BATCH

NUMBERS = 65_994  # float32 numbers in the gradient of the CNN of `make demo`


def exchange_round_a_ring(lesson: Any) -> None:
    """Every rank sends to its right neighbour and receives from its left one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lesson.exchange(_mine(), (rank + 1) % size, _mine(), (rank - 1) % size)


def broadcast_from_rank_0(lesson: Any) -> None:
    """Broadcast the data of rank 0."""
    lesson.broadcast(_mine(), 0)


def all_reduce_naive(lesson: Any) -> None:
    """One all-reduce of a gradient."""
    lesson.all_reduce_naive(_mine())


def all_reduce_recursive_doubling(lesson: Any) -> None:
    """One all-reduce of a gradient."""
    lesson.all_reduce_recursive_doubling(_mine())


def scatter_a_batch(lesson: Any) -> None:
    """Scatter a global batch of small images from rank 0."""
    batch = (torch.zeros(BATCH, 1, 8, 8), torch.zeros(BATCH, dtype=torch.int64))
    lesson.scatter_batch(batch if dist.get_rank() == 0 else None)


def broadcast_two_layers(lesson: Any) -> None:
    """Broadcast the parameters of two layers from rank 0."""
    lesson.broadcast_parameters(_two_layers())


def average_two_layers(lesson: Any) -> None:
    """Average the gradients of two layers, a message each."""
    module = _two_layers()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    lesson.average_gradients(module)


def _mine() -> Tensor:
    return torch.full((NUMBERS,), float(dist.get_rank()))


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10))


BODIES: Mapping[str, Callable[[Any], None]] = {
    "1.3": scatter_a_batch,
    "1.4": exchange_round_a_ring,
    "1.5": broadcast_from_rank_0,
    "1.6": all_reduce_naive,
    "1.7": all_reduce_recursive_doubling,
    "1.9": broadcast_two_layers,
    "1.10": average_two_layers,
}
