"""Bodies for the regions of tasks 2.14 and 2.19."""

from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import cause_told, refusal_of, returned
from judging.comparing import noting_changes
from judging.tensors import given_group
from phase2.sharding import (
    drawn,
    go_backward_with,
    is_alone_summed,
    laid_out,
    listed,
    place,
)

INFINITE, UNTRAINED, NUMBER, SHORT = "infinite on rank 0", "no gradient needed", "a number", "short"
INNER = "inside of a graph"  # it is no leaf, so that nothing hinders a write into it
SEQUENCE_KINDS = ("contiguous", "transposed", "expanded gradient", INNER, "bfloat16", UNTRAINED)
SEQUENCE_KINDS = (*SEQUENCE_KINDS, "float32", SHORT)
KINDS = (*SEQUENCE_KINDS, NUMBER, INFINITE)


def shape_of(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a kind of tensor, where ``shape`` is usual; a short one has two dims."""
    return {NUMBER: (), SHORT: (1, shape[1] // 2)}.get(kind, shape)


def tensor_of(kind: str, rank: int, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Small whole numbers over 8, which sum exactly in every dtype."""
    dtype = getattr(torch, kind) if kind.startswith(("float", "bfloat")) else torch.float64
    generator = torch.Generator().manual_seed(97 * seed + rank)
    numbers = torch.randint(-15, 16, shape_of(kind, shape), generator=generator).to(dtype) / 8
    if kind == INFINITE and rank == 0:
        return numbers.fill_(inf)
    if kind == "expanded gradient" and seed:
        return numbers.flatten()[0].expand(shape)
    return laid_out(numbers, kind == "transposed")


def through_region(
    lesson: Any,
    function: str,
    kinds: tuple[str, ...],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    group: Any = None,
) -> list[dict[str, Any]]:
    """Pass every kind of tensor through a region, and a gradient back; a barrier lies between.

    Args:
        shapes: Shapes of what goes in and of what comes out.
    """
    rank, _ = place(group)
    given = [_input(kind, tensor_of(kind, rank, 0, shapes[0])) for kind in kinds]
    gradients = [tensor_of(kind, rank, 1, shapes[1]) for kind in kinds]
    before = [listed(x) for x in given]
    changes = {f"x {i}": x for i, x in enumerate(given)}
    changes |= {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
    with noting_changes(**changes) as changed:
        region = getattr(lesson, function)
        outputs = [returned(function, region(x, **given_group(group))) for x in given]
        found = [_found(x, y) for x, y in zip(given, outputs, strict=True)]
        dist.barrier(group)
        for x, y, gradient in zip(given, outputs, gradients, strict=True):
            if x.requires_grad:
                go_backward_with(y, gradient)
    for i, (entry, x) in enumerate(zip(found, given, strict=True)):
        entry |= {"x": before[i], "gradient": listed(gradients[i]), "x_grad": listed(x.grad)}
        entry["changed"] = [name for name in ("x", "gradient") if f"{name} {i}" in changed]
        entry["is_alone"] = not x.requires_grad or is_alone_summed(x)
    return found


def _input(kind: str, x: Tensor) -> Tensor:
    x.requires_grad_(kind != UNTRAINED)
    if kind == INNER:
        x = x.clone()
        x.retain_grad()
    return x


def _found(x: Tensor, y: Tensor) -> dict[str, Any]:
    return {
        "y": listed(y),
        "has_graph": y.requires_grad,
        "is_copied": y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(),
        "dtypes": [str(x.dtype), str(y.dtype)],
    }


def refused_positions(lesson: Any, num_positions: int) -> dict[str, str]:
    """Return the error for a sequence that cannot be split evenly."""
    x = drawn(2, num_positions, 3, seed=1)
    cause = {
        "": f"{num_positions} positions cannot be split evenly over {dist.get_world_size()} ranks: "
        "raise a ValueError before anything is sent."
    }
    with cause_told(cause):
        return refusal_of(lambda: lesson.reduce_scatter_to_sequence_region(x))
