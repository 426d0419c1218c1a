"""What collectives do to tensors, given the calls of all ranks in group order.

Sums are made in the order of the ranks, whoever came first, in the dtype of the tensors.
"""

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.sim.errors import NotSimulated

if TYPE_CHECKING:
    from distlab.sim.meetings import Call

Calls = Sequence["Call"]

_OPERATORS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,  # divided afterwards
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def op_of(opts: Any) -> Any:
    """Return the reduction that options ask for; a sum if there are none."""
    op = opts.reduceOp if opts else dist.ReduceOp.SUM
    return getattr(op, "op", op)  # a ReduceOp wraps its kind


def op_name(op: Any) -> str:
    """Write ``SUM``."""
    return str(op).rpartition(".")[2]


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def alike(tensors: Sequence[Tensor]) -> dict[str, object]:
    """Return what must be equal on all ranks for a call on these tensors."""
    sizes: Any = [tensor.numel() for tensor in tensors]
    dtypes: Any = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    if len(tensors) == 1:
        sizes, dtypes = sizes[0], dtypes[0]
    return {"size": sizes, "dtype": dtypes}


def parts(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    """Split along dim 0 as ``all_to_all_single`` does."""
    if splits:
        return list(torch.split(tensor, list(splits)))
    return list(tensor.chunk(size)) if tensor.numel() else [tensor] * size


def _reduced(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    operator = _OPERATORS.get(op)
    if operator is None:
        raise NotSimulated(
            f"reduction {op_name(op)} is not simulated: use one of "
            f"{', '.join(sorted(op_name(known) for known in _OPERATORS))}"
        )
    total = fold(operator, [tensor.detach() for tensor in tensors])
    return total / len(tensors) if op == dist.ReduceOp.AVG else total


def _write(output: Tensor, value: Tensor) -> None:
    output.detach().copy_(value.detach().reshape(output.shape))


def nothing(calls: Calls) -> None:
    """Move nothing: a barrier."""


def broadcast(root: int, calls: Calls) -> None:
    """Copy the root's tensors to all."""
    for call in calls:
        if call is not calls[root]:
            for output, value in zip(call.outputs, calls[root].inputs, strict=True):
                _write(output, value)


def all_reduce(op: Any, calls: Calls) -> None:
    """Write the reduction to every rank."""
    for tensors in zip(*(call.inputs for call in calls), strict=True):
        total = _reduced(op, tensors)
        for tensor in tensors:
            _write(tensor, total)


def reduce(op: Any, root: int, calls: Calls) -> None:
    """Write the reduction to the root."""
    for output, *tensors in zip(calls[root].outputs, *(call.inputs for call in calls), strict=True):
        _write(output, _reduced(op, tensors))


def all_gather(calls: Calls) -> None:
    """Write everybody's tensor to every rank."""
    values = [call.inputs[0] for call in calls]  # may be its own place in the output: harmless
    for call in calls:
        for output, value in zip(call.outputs, values, strict=True):
            _write(output, value)


def gather(root: int, calls: Calls) -> None:
    """Write everybody's tensor to the root."""
    for output, call in zip(calls[root].outputs, calls, strict=True):
        _write(output, call.inputs[0])


def scatter(root: int, calls: Calls) -> None:
    """Write the root's k-th tensor to rank k."""
    for call, value in zip(calls, calls[root].inputs, strict=True):
        _write(call.outputs[0], value)


def reduce_scatter(op: Any, calls: Calls) -> None:
    """Write the reduction of everybody's k-th tensor to rank k."""
    totals = [_reduced(op, tensors) for tensors in zip(*(c.inputs for c in calls), strict=True)]
    for call, total in zip(calls, totals, strict=True):
        _write(call.outputs[0], total)


def all_to_all(calls: Calls) -> None:
    """Write everybody's k-th input to rank k."""
    values = [[tensor.detach().clone() for tensor in call.inputs] for call in calls]
    for k, call in enumerate(calls):
        for output, row in zip(call.outputs, values, strict=True):
            _write(output, row[k])
