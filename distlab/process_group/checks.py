"""Argument checks, made on the calling rank at the time of the call, before others wait for it.

Calls that gloo or NCCL refuses, or silently gets wrong, are refused here, so that a program that
runs in one world runs in all of them. The error is a RuntimeError, like gloo's. A peer outside the
group, for which gloo would wait, raises a ValueError, as elsewhere in torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Dtypes that both gloo and NCCL can reduce; complex numbers are passed as pairs of reals.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
_REDUCIBLE: dict[Any, tuple[torch.dtype, ...]] = {
    dist.ReduceOp.SUM: _FLOATS + _INTEGERS,
    dist.ReduceOp.AVG: _FLOATS,
    dist.ReduceOp.PRODUCT: _FLOATS + _INTEGERS,
    dist.ReduceOp.MIN: _FLOATS + _INTEGERS,
    dist.ReduceOp.MAX: _FLOATS + _INTEGERS,
    dist.ReduceOp.BAND: _INTEGERS,
    dist.ReduceOp.BOR: _INTEGERS,
    dist.ReduceOp.BXOR: _INTEGERS,
}
_REDUCIBLE_BY_NCCL = {**_REDUCIBLE, dist.ReduceOp.PREMUL_SUM: _FLOATS}


def kind_of(op: Any) -> Any:
    """Return the kind of a reduction; a ReduceOp wraps it, for a scaled sum with the factor."""
    return getattr(op, "op", op)


def op_name(op: Any) -> str:
    """Return the name of a reduction, such as ``SUM``."""
    return str(kind_of(op)).rpartition(".")[2]


def check_reduction(op: Any, tensors: Sequence[Tensor], *, can_scale: bool = False) -> None:
    """Check that both gloo and NCCL support a reduction of these tensors.

    Args:
        can_scale: True if NCCL alone matters, which has scaled sums.

    Raises:
        RuntimeError: The reduction exists only in NCCL, or rejects the dtype.
    """
    kind, reducible = kind_of(op), _REDUCIBLE_BY_NCCL if can_scale else _REDUCIBLE
    if kind not in reducible:
        known = ", ".join(sorted(map(op_name, _REDUCIBLE)))
        raise RuntimeError(f"only NCCL has the reduction {op_name(op)}: use one of {known}")
    for tensor in tensors:
        if tensor.dtype not in reducible[kind]:
            raise RuntimeError(
                f"gloo and NCCL have no {op_name(op)} of {tensor.dtype}: convert the tensor first"
            )


def check_peer(name: str, peer: int, group_size: int, me: int) -> None:
    """Check that the group has a rank ``peer``; gloo would wait in vain for a missing one.

    Args: me: Rank that makes the call, numbered inside the group like ``peer``.
    Raises: ValueError: ``peer`` is not a rank of the group.
    """
    if not 0 <= peer < group_size:
        # Only a number just outside the range suggests a mistake in a ring.
        step = {me + 1: "rank + 1", me - 1: "rank - 1"}.get(peer)
        advice = (
            f"; in a ring, the neighbour is ({step}) % {group_size}, and at the end of a line, as "
            "in a pipeline, there is none"
            if step
            else ""
        )
        raise ValueError(
            f"{name}: the group has no rank {peer}, its ranks are 0 to {group_size - 1}{advice}"
        )


def check_contiguous(
    name: str,
    tensors: Sequence[Tensor],
    *,
    or_channels_last: bool = False,
    or_sparse: bool = False,
) -> None:
    """Check that tensors are contiguous.

    NCCL refuses other tensors too; gloo reads their memory in order and returns wrong results
    without an error. Element-wise calls, such as sums, also accept channels-last images
    (``or_channels_last``), and some worlds can sum sparse tensors (``or_sparse``).

    Raises:
        RuntimeError: A tensor is sparse, or is not contiguous.
    """
    for tensor in tensors:
        if or_sparse and tensor.is_sparse:
            continue
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"{name} needs a dense tensor, got a {tensor.layout} one: use .to_dense()"
            )
        if not (tensor.is_contiguous() or (or_channels_last and _is_channels_last(tensor))):
            received = "" if name == "send" else ", and copy back what it received"
            raise RuntimeError(
                f"{name} needs contiguous tensors, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: use .contiguous(){received}"
            )


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    known = formats.get(tensor.dim())
    return known is not None and tensor.is_contiguous(memory_format=known)


def check_own_part(
    name: str, tensors: Sequence[Tensor], size: int, rank: int, like: Tensor, what: str = "output"
) -> None:
    """Check that a list has one tensor per rank, and that this rank's has the shape of ``like``.

    Args: what: Whether ``like`` is the "input" or the "output".
    Raises: RuntimeError.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(shapes) != size or shapes[rank] != tuple(like.shape):
        raise RuntimeError(
            f"{name} over {size} ranks needs a list of {size} tensors, and on rank {rank} of the "
            f"group the one at index {rank} has the shape of the {what}, {tuple(like.shape)}; "
            f"got {shapes}"
        )


def check_one_per_rank(name: str, tensors: Sequence[Tensor], size: int, like: Tensor) -> None:
    """Check that a list has one tensor per rank, each with the shape of ``like``.

    Raises: RuntimeError.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if shapes != [tuple(like.shape)] * size:
        raise RuntimeError(
            f"{name} over {size} ranks with a tensor of shape {tuple(like.shape)} needs a list of "
            f"{size} tensors of that shape, got {shapes}"
        )
