"""Bodies for tasks 2.15, 2.16 and 2.18: one layer, made from a full one."""

import gc
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.calls import case_told, refusal_of, returned
from phase2.sharding import (
    drawn,
    go_backward,
    group_argument,
    is_alone_summed,
    laid_out,
    linear,
    listed,
    own,
    place,
    state_of,
    wrong_shapes,
)

COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"
SPLIT_DIMS: dict[str, dict[str, int | None]] = {  # the dim that is split
    COLUMN: {"weight": 0, "bias": 0},
    ROW: {"weight": 1, "bias": None},
}


@dataclass(frozen=True)
class Case:
    """A full layer, and what it is given.

    Attributes:
        frozen: the parameter that is not trained, by name; "": none.
        is_input_trained: whether the input needs a gradient.
        is_transposed: whether input and gradient are transposed in memory.
    """

    in_features: int
    out_features: int
    rows: tuple[int, ...]
    has_bias: bool = True
    gathers: bool = False
    frozen: str = ""
    is_input_trained: bool = True
    dtype: str = "float64"
    is_transposed: bool = False

    def __str__(self) -> str:
        """What a message calls it."""
        extras = ["gather_output=True"] * self.gathers + ["no bias"] * (not self.has_bias)
        extras += [f"frozen {self.frozen}"] * bool(self.frozen)
        extras += ["an input without gradient"] * (not self.is_input_trained)
        extras += [self.dtype] * (self.dtype != "float64")
        extras += ["transposed"] * self.is_transposed
        size = f"Linear({self.in_features}, {self.out_features})"
        return ", ".join([size, f"x {[*self.rows, self.in_features]}", *extras])

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]

    def full(self) -> nn.Linear:
        """Build the full layer."""
        layer = linear(self.in_features, self.out_features, self.has_bias)
        if self.frozen:
            getattr(layer, self.frozen).requires_grad_(False)
        return layer.to(getattr(torch, self.dtype))

    def x(self) -> Tensor:
        """The full input."""
        return drawn(*self.rows, self.in_features, seed=51).to(getattr(torch, self.dtype))

    def weights(self) -> Tensor:
        """What the full output is multiplied by in the loss."""
        return drawn(*self.rows, self.out_features, seed=52).to(getattr(torch, self.dtype))


def linear_case(lesson: Any, layer: str, case: Case, group: Any = None) -> dict[str, Any]:
    """Make a layer and pass an input through it, and a gradient back; barriers lie between."""
    rank, n = place(group)
    torch.manual_seed(rank)  # what is drawn anew is not the full layer's
    full = case.full()
    before = [listed(p) for p in full.parameters()]
    made = _made(lesson, layer, full, case, group)
    is_kept = before == [listed(p) for p in full.parameters()]
    trained = [p.requires_grad for p in full.parameters()]
    is_alike = trained == [p.requires_grad for p in case.full().parameters()]
    is_own, watched = is_untouched_by(full, made), ref(full.weight)
    del full
    gc.collect()
    is_column = layer == COLUMN
    x = case.x() if is_column else own(case.x(), rank, n, -1).clone()
    x = laid_out(x, case.is_transposed).requires_grad_(case.is_input_trained)
    weights = case.weights()
    weights = own(weights, rank, n, -1) if is_column and not case.gathers else weights
    weights = laid_out(weights, case.is_transposed)
    dist.barrier(group)
    wrong = wrong_shapes(made, case.full(), (rank, n), SPLIT_DIMS[layer])
    with case_told(f"of {layer}, {case}{wrong}", "a pass"):
        output = returned(f"{layer}.forward", made(x))
        dist.barrier(group)
        go_backward(output, weights)
    return {
        "output": listed(output),
        "has_graph": output.requires_grad,
        "input": listed(x.grad),
        "is_alone": not x.requires_grad or is_alone_summed(x, x.detach().clone()),
        "state": state_of(made),
        "is_kept": is_kept and is_alike,
        "is_own": is_own,
        "is_freed": watched() is None,
    }


def is_untouched_by(full: nn.Module, made: nn.Module) -> bool:
    """Whether the parameters of a layer stay as they are while those of the full one are zero."""
    before = [listed(p) for p in made.parameters()]
    values = [p.detach().clone() for p in full.parameters()]
    for parameter in full.parameters():
        parameter.detach().zero_()
    during = [listed(p) for p in made.parameters()]
    for parameter, value in zip(full.parameters(), values, strict=True):
        parameter.detach().copy_(value)
    return before == during


def _made(lesson: Any, layer: str, full: nn.Linear, case: Case, group: Any) -> Any:
    """Leave out what may be left out."""
    more = {"gather_output": True} if case.gathers else {}
    with case_told(f"of {case}", layer):
        return getattr(lesson, layer)(full, **group_argument(group), **more)


def refused_linear(lesson: Any, layer: str, in_features: int, out_features: int) -> dict[str, str]:
    """How a layer that cannot be split evenly is refused."""
    full = linear(in_features, out_features, True)
    return refusal_of(lambda: getattr(lesson, layer)(full))
