"""Effects of collectives on tensors, given the calls of all ranks in group order.

Sums are taken in rank order, not in order of arrival, and in the dtype of the tensors.
"""

from collections.abc import Callable, Sequence
from functools import reduce as fold
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.process_group.call import Call, describe
from distlab.process_group.checks import check_contiguous, kind_of

Calls = Sequence[Call]

_OPERATORS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,  # the sum is divided afterwards
    dist.ReduceOp.PREMUL_SUM: torch.add,  # each input is multiplied before
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def op_of(opts: Any) -> Any:
    """Return the reduction in a call's options, or a sum if there are no options.

    It is the kind of reduction or, for a scaled sum, the object that also holds the factor.
    """
    op = opts.reduceOp if opts else dist.ReduceOp.SUM
    return op if kind_of(op) == dist.ReduceOp.PREMUL_SUM else kind_of(op)


def as_reals(op: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """View complex tensors as reals if ``op`` can reduce real and imaginary parts separately."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return list(tensors)
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the number of bytes in all elements of the tensors."""
    parts = ([x._indices(), x._values()] if x.is_sparse else [x] for x in tensors)
    return sum(part.numel() * part.itemsize for part in chain.from_iterable(parts))


def alike(tensors: Sequence[Tensor]) -> dict[str, object]:
    """Return the sizes and dtypes of tensors, as values that must be equal on all ranks."""
    sizes: Any = [tensor.numel() for tensor in tensors]
    dtypes: Any = [
        f"sparse {tuple(tensor.shape)} " * tensor.is_sparse
        + str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors
    ]
    if len(tensors) == 1:
        sizes, dtypes = sizes[0], dtypes[0]
    return {"size": sizes, "dtype": dtypes}


def equal_parts(
    name: str, whole: Tensor, part: Tensor, size: int, *, any_shape: bool = False
) -> Sequence[Tensor]:
    """Cut ``whole`` into ``size`` flat tensors with as many elements as ``part``.

    Args: any_shape: True if NCCL alone matters, which compares only the numbers of elements.
    Raises: RuntimeError: The number of elements, the dtype or the shape does not fit.
    """
    check_contiguous(name, [whole])
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise RuntimeError(
            f"{name} over {size} ranks needs one tensor {size} times as large as the other, got "
            f"{describe(whole)} and {describe(part)}"
        )
    if not any_shape:
        _check_along_dim_0(name, whole, part, size)
    return whole.view(-1).chunk(size) if whole.numel() else [whole] * size


def _check_along_dim_0(name: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Check that ``whole`` has the shape of ``size`` tensors like ``part``, one below another.

    Raises: RuntimeError.
    """
    shape, fitting = tuple(part.shape), (size * sum(part.shape[:1]), *part.shape[1:])
    if not shape:
        raise RuntimeError(
            f"{name} over {size} ranks: gloo needs tensors that have a first dim, got one of shape "
            f"(): pass .view(1) of it, and .view({size}) of the other"
        )
    if tuple(whole.shape) != fitting:
        raise RuntimeError(
            f"{name} over {size} ranks: beside a tensor of shape {shape}, gloo needs one of shape "
            f"{fitting}, got {tuple(whole.shape)}: pass .view({', '.join(map(str, fitting))}) of it"
        )


def parts(tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[Tensor]:
    """Split a tensor along dim 0, as ``all_to_all_single`` does.

    Raises: RuntimeError: The splits do not fit, or are missing and equal parts are impossible.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits and (len(splits) != size or sum(splits) != rows):
        raise RuntimeError(
            f"all_to_all_single over {size} ranks needs {size} splits that add up to {rows}, the "
            f"first dim of shape {tuple(tensor.shape)}, got {list(splits)}"
        )
    if not splits and (rows % size or not tensor.dim()):
        raise RuntimeError(
            f"all_to_all_single without splits needs a first dim that is a multiple of {size}, "
            f"got shape {tuple(tensor.shape)}"
        )
    return list(torch.split(tensor, list(splits) if splits else [rows // size] * size))


def _reduced(calls: Calls, tensors: Sequence[Tensor]) -> Tensor:
    """Return the reduction of one tensor of each call."""
    op = kind_of(calls[0].op)
    shape = tensors[0].shape  # the other tensors may be shaped differently
    same = [x if x.is_sparse else x.reshape(shape) for x in (tensor.detach() for tensor in tensors)]
    if op == dist.ReduceOp.PREMUL_SUM:
        same = [_scaled(x, call.op) for x, call in zip(same, calls, strict=True)]
    total = fold(_OPERATORS[op], same)
    return total / len(tensors) if op == dist.ReduceOp.AVG else total


def _scaled(x: Tensor, op: Any) -> Tensor:
    _, factor = op.__getstate__()  # a number or a tensor
    return torch.mul(x, factor).to(x.dtype)


def _write(output: Tensor, value: Tensor) -> None:
    if output.is_sparse:
        with torch.no_grad():  # detach() would give a sparse tensor separate elements
            output.copy_(value)
    else:
        output.detach().copy_(value.detach().reshape(output.shape))


def broadcast(calls: Calls) -> None:
    """Copy the root's tensors to all ranks."""
    source = calls[calls[0].root]
    for call in calls:
        if call is not source:
            for output, value in zip(call.outputs, source.inputs, strict=True):
                _write(output, value)


def all_reduce(calls: Calls) -> None:
    """Reduce the ranks' tensors, and write the result to every rank."""
    for tensors in zip(*(call.inputs for call in calls), strict=True):
        total = _reduced(calls, tensors)
        for tensor in tensors:
            _write(tensor, total)


def reduce(calls: Calls) -> None:
    """Reduce the ranks' tensors, and write the result to the root."""
    outputs = calls[calls[0].root].outputs
    for output, *tensors in zip(outputs, *(call.inputs for call in calls), strict=True):
        _write(output, _reduced(calls, tensors))


def all_gather(calls: Calls) -> None:
    """Write the tensors of all ranks to every rank."""
    by_tensor = zip(*(call.inputs for call in calls), strict=True)
    values = [value for tensors in by_tensor for value in tensors]
    # An input may alias its slot in the output; copying it onto itself is harmless.
    for call in calls:
        for output, value in zip(call.outputs, values, strict=True):
            _write(output, value)


def gather(calls: Calls) -> None:
    """Write the tensors of all ranks to the root."""
    for output, call in zip(calls[calls[0].root].outputs, calls, strict=True):
        _write(output, call.inputs[0])


def scatter(calls: Calls) -> None:
    """Write the root's k-th tensor to rank k."""
    for call, value in zip(calls, calls[calls[0].root].inputs, strict=True):
        _write(call.outputs[0], value)


def reduce_scatter(calls: Calls) -> None:
    """Reduce the k-th tensors of all ranks, and write the result to rank k."""
    by_part = zip(*(call.inputs for call in calls), strict=True)
    totals = [_reduced(calls, tensors) for tensors in by_part]
    for k, call in enumerate(calls):
        for output, total in zip(call.outputs, totals[k :: len(calls)], strict=True):
            _write(output, total)


def all_to_all(calls: Calls) -> None:
    """Write the k-th inputs of all ranks to rank k."""
    values = [[tensor.detach().clone() for tensor in call.inputs] for call in calls]
    for k, call in enumerate(calls):
        for output, row in zip(call.outputs, values, strict=True):
            _write(output, row[k])


MOVES: dict[str, Callable[[Calls], None]] = {
    move.__name__: move
    for move in (
        *(broadcast, all_reduce, reduce, all_gather, gather),
        *(scatter, reduce_scatter, all_to_all),
    )
} | dict.fromkeys(("barrier", "monitored_barrier"), lambda calls: None)
