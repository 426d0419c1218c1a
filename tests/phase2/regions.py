"""Bodies for the regions of tasks 2.14 and 2.19."""

from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import cause_told, refusal_of, returned
from phase2.sharding import (
    drawn,
    go_backward_with,
    group_argument,
    is_alone_summed,
    laid_out,
    listed,
    place,
)

INFINITE, UNTRAINED = "infinite on rank 0", "no gradient needed"
SEQUENCE_KINDS = ("contiguous", "transposed", "expanded gradient", "float32", UNTRAINED)
KINDS = (*SEQUENCE_KINDS, "a number", INFINITE, "bfloat16")


def kinds_for(kinds: tuple[str, ...], n: int) -> tuple[str, ...]:
    """Layouts and dtypes for n ranks: beyond three, what else could go wrong is the number."""
    return kinds if n <= 3 else kinds[:2]


def tensors_of(kind: str, rank: int, seed: int = 0, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    """Small whole numbers over 8, which sum exactly in every dtype."""
    dtype = getattr(torch, kind) if kind.startswith(("float", "bfloat")) else torch.float64
    shape = () if kind == "a number" else shape
    generator = torch.Generator().manual_seed(97 * seed + rank)
    numbers = torch.randint(-15, 16, shape, generator=generator).to(dtype) / 8
    if kind == "transposed":
        return laid_out(numbers, True)
    if kind == INFINITE and rank == 0:
        return numbers.fill_(inf)
    if kind == "expanded gradient" and seed:
        return numbers.flatten()[0].expand(shape)
    return numbers


def through_region(
    lesson: Any,
    function: str,
    kinds: tuple[str, ...],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    group: Any = None,
) -> list[dict[str, Any]]:
    """Pass every kind of tensor through a region, and a gradient back; barriers lie between.

    Args:
        shapes: of what goes in, and of what comes out.
    """
    rank, _ = place(group)
    given = [tensors_of(kind, rank, 0, shapes[0]) for kind in kinds]
    for kind, x in zip(kinds, given, strict=True):
        x.requires_grad_(kind != UNTRAINED)
    gradients = [tensors_of(kind, rank, 1, shapes[1]) for kind in kinds]
    region, before = getattr(lesson, function), [listed(x) for x in given]
    outputs = [returned(function, region(x, **group_argument(group))) for x in given]
    found = [_found(x, y, g) for x, y, g in zip(given, outputs, gradients, strict=True)]
    dist.barrier(group)
    for x, y, gradient in zip(given, outputs, gradients, strict=True):
        has_way = x.requires_grad and y.requires_grad and y.shape == gradient.shape
        if has_way:  # if it should have one, the judge says why it has none
            go_backward_with(y, gradient)
    for entry, x, gradient, was in zip(found, given, gradients, before, strict=True):
        entry |= {"x_grad": listed(x.grad), "x_after": listed(x), "after": listed(gradient)}
        entry["x"] = was
        entry["is_alone"] = not x.requires_grad or is_alone_summed(x, x.detach().clone())
    return found


def _found(x: Tensor, y: Tensor, gradient: Tensor) -> dict[str, Any]:
    return {
        "y": listed(y),
        "has_graph": y.requires_grad,
        "gradient": listed(gradient),
        "is_copied": y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(),
        "dtypes": [str(x.dtype), str(y.dtype)],
    }


def refused_positions(lesson: Any, num_positions: int) -> dict[str, str]:
    """How a sequence that cannot be split evenly is refused."""
    x = drawn(2, num_positions, 3, seed=1)
    cause = {
        "": f"{num_positions} positions cannot be split evenly over {dist.get_world_size()} ranks: "
        "raise a ValueError before anything is sent."
    }
    with cause_told(cause):
        return refusal_of(lambda: lesson.reduce_scatter_to_sequence_region(x))
