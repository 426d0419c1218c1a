"""Bodies for tasks 2.17 and 2.19: modules of several layers, split in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.calls import case_told, refusal_of
from phase2.sharding import (
    drawn,
    go_backward,
    group_argument,
    is_alone_summed,
    laid_out,
    listed,
    model_of,
    own,
    place,
    state_of,
    wrong_shapes,
)

FUNCTIONS = {
    "mlp": "parallelize_mlp",
    "attention": "parallelize_attention",
    "block": "parallelize_block",
}
NORMS = "attention_norm", "mlp_norm"


@dataclass(frozen=True)
class Case:
    """A full module, and what it is given.

    Attributes:
        kind: "mlp", "attention" or "block".
        frozen: ends of the names of parameters that are not trained.
        num_passes: forward and backward passes, whose gradients add up.
        is_transposed: whether input and gradient are transposed in memory.
        is_input_trained: whether the input needs a gradient.
    """

    kind: str
    width: int
    heads: int
    batch_size: int
    length: int
    without_bias: bool = False
    frozen: tuple[str, ...] = ()
    num_passes: int = 1
    is_transposed: bool = False
    is_input_trained: bool = True

    def __str__(self) -> str:
        """What a message calls it."""
        size = f"width {self.width}" + f", {self.heads} heads" * (self.kind != "mlp")
        extras = ["no bias"] * self.without_bias + [f"frozen {name}" for name in self.frozen]
        extras += [f"{self.num_passes} passes"] * (self.num_passes > 1)
        extras += ["transposed"] * self.is_transposed
        extras += ["an input without gradient"] * (not self.is_input_trained)
        shape = [self.batch_size, self.length, self.width]
        return ", ".join([FUNCTIONS[self.kind], size, f"x {shape}", *extras])

    def full(self) -> nn.Module:
        """Build the full module."""
        model = model_of(self.kind, self.width, self.heads, self.without_bias)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith(self.frozen or ("none",)))
        return model

    def x(self, step: int = 0) -> Tensor:
        """The full input of a pass."""
        return drawn(self.batch_size, self.length, self.width, seed=61 + 2 * step)

    def weights(self, step: int = 0) -> Tensor:
        """What the full output is multiplied by in the loss."""
        return drawn(self.batch_size, self.length, self.width, seed=62 + 2 * step)


def block_case(lesson: Any, case: Case, group: Any = None) -> dict[str, Any]:
    """Split a module and pass inputs through it, and gradients back; barriers lie between."""
    rank, n = place(group)
    torch.manual_seed(rank)
    model, seen = case.full(), list[list[int]]()
    for name in NORMS if case.kind == "block" else ():
        getattr(model, name).register_forward_hook(lambda _, x, y: seen.append([*y.shape]))
    with case_told(f"of {case}"):
        getattr(lesson, FUNCTIONS[case.kind])(model, **group_argument(group))
    wrong = wrong_shapes(model, case.full(), (rank, n))
    outputs, inputs, is_alone, has_graph = [], [], True, True
    for step in range(case.num_passes):
        x, weights = (_own_input(case, full, rank, n) for full in _drawn(case, step))
        dist.barrier(group)
        with case_told(f"of {case}{wrong}", "a pass"):
            output = model(x.requires_grad_(case.is_input_trained))
            dist.barrier(group)
            go_backward(output, weights)
        outputs.append(listed(output))
        has_graph = has_graph and output.requires_grad
        inputs.append(listed(x.grad))
        if case.is_input_trained:
            is_alone = is_alone and is_alone_summed(x, weights)
    found = {"outputs": outputs, "inputs": inputs, "is_alone": is_alone, "norms": seen}
    return {**found, "has_graph": has_graph, "state": state_of(model)}


def _drawn(case: Case, step: int) -> Sequence[Tensor]:
    return case.x(step), case.weights(step)


def _own_input(case: Case, full: Tensor, rank: int, n: int) -> Tensor:
    """A block gets its rank's positions, anything else the whole input."""
    part = own(full, rank, n, 1).clone() if case.kind == "block" else full
    return laid_out(part, case.is_transposed)


def refused_block(lesson: Any, case: Case) -> dict[str, Any]:
    """How a module that cannot be split is refused, and whether it is then as before."""
    model = case.full()
    before = _layers(model)
    function = getattr(lesson, FUNCTIONS[case.kind])
    refusal = refusal_of(lambda: function(model))
    is_kept = before == _layers(model) and not any(m._forward_pre_hooks for m in model.modules())
    return {**refusal, "is_kept": is_kept}


def _layers(model: nn.Module) -> list[int]:
    return [id(module) for module in model.modules()]
