"""Tensors in the forms that MPI accepts: contiguous bytes, or numbers that it can reduce."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

Memory = list[Any]  # a buffer and its MPI type, as mpi4py expects them

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
# Dtypes that not every MPI can reduce. 16-bit floats are summed in float32 and rounded once.
_SUBSTITUTES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
}
_OPERATORS: dict[Any, MPI.Op] = {
    dist.ReduceOp.SUM: MPI.SUM,
    dist.ReduceOp.AVG: MPI.SUM,  # the sum is divided afterwards
    dist.ReduceOp.PRODUCT: MPI.PROD,
    dist.ReduceOp.MIN: MPI.MIN,
    dist.ReduceOp.MAX: MPI.MAX,
    dist.ReduceOp.BAND: MPI.BAND,
    dist.ReduceOp.BOR: MPI.BOR,
    dist.ReduceOp.BXOR: MPI.BXOR,
}
# Operators for booleans, which MPI sees as bytes: true + true is true, not 2.
_OF_TRUTHS = {**_OPERATORS, dist.ReduceOp.SUM: MPI.MAX, dist.ReduceOp.PRODUCT: MPI.MIN}


def _floats_op(ufunc: Callable[..., Any], dtype: type) -> MPI.Op:
    """Return a float operator whose result is NaN if any operand is NaN.

    With MPI's own operators, the result depends on the order of the operands, which differs
    between ranks.
    """

    def fold(left: Any, into: Any, _: MPI.Datatype) -> None:
        rights: Any = np.frombuffer(into, dtype)
        ufunc(np.frombuffer(left, dtype), rights, out=rights)

    return MPI.Op.Create(fold, commute=False)  # not commutative: all ranks fold in rank order


_OF_FLOATS = {
    torch.float32: {
        **_OPERATORS,
        dist.ReduceOp.MIN: _floats_op(np.minimum, np.float32),
        dist.ReduceOp.MAX: _floats_op(np.maximum, np.float32),
    },
    torch.float64: {
        **_OPERATORS,
        dist.ReduceOp.MIN: _floats_op(np.minimum, np.float64),
        dist.ReduceOp.MAX: _floats_op(np.maximum, np.float64),
    },
}


def flat(tensor: Tensor) -> Tensor:
    """Return a detached 1-D view of a tensor's elements in memory order.

    Raises:
        ValueError: The tensor is not in CPU memory.
    """
    if tensor.device.type != "cpu":
        raise ValueError(
            f"MPI moves tensors on the CPU, but got one on {tensor.device}: use .cpu(), and copy "
            "back what it received"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def raw(tensor: Tensor) -> Memory:
    """Return a tensor's memory as bytes, for MPI."""
    return [flat(tensor).view(torch.uint8).numpy(), MPI.BYTE]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of several tensors' elements as one flat tensor."""
    return torch.cat([flat(tensor) for tensor in tensors])


def write(outputs: Sequence[Tensor], row: Tensor) -> None:
    """Copy consecutive parts of a row to several tensors."""
    parts = torch.split(row, [output.numel() for output in outputs])
    for output, part in zip(outputs, parts, strict=True):
        flat(output).copy_(part)


class Operand:
    """A copy of some tensors' elements, which MPI reduces in place.

    MPI's algorithm adds in the same order in every run and on all ranks, but not always in gloo's
    order. Sums of three or more floats may therefore differ from gloo's in their last bits.
    """

    def __init__(self, tensors: Sequence[Tensor], op: Any) -> None:
        self._is_mean = op == dist.ReduceOp.AVG
        row = joined(tensors)
        self.values = row.to(_SUBSTITUTES.get(row.dtype, row.dtype))
        self.type = _TYPES[self.values.dtype]
        operators = _OF_FLOATS.get(self.values.dtype, _OPERATORS)
        self.op = (_OF_TRUTHS if row.dtype == torch.bool else operators)[op]

    def memory(self) -> Memory:
        """Return the memory of the copy as numbers, for MPI."""
        return [self.values.numpy(), self.type]

    def result(self, num_ranks: int) -> Tensor:
        """Return the result, once MPI has reduced the copy in place."""
        return self.values / num_ranks if self._is_mean else self.values
