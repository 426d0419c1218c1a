"""Bodies for tasks 2.15 to 2.19: modules and a loss that are split over the ranks."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from distlab.grade import WrongResult
from judging.calls import case_told, refusal_of, returned
from judging.comparing import noting_changes
from judging.models import IGNORED
from judging.tensors import given_group
from phase2.sharding import (
    drawn,
    go_backward_with,
    is_alone_summed,
    laid_out,
    listed,
    place,
    rank_part,
    state_of,
)
from phase2_advanced.given import MLP, Attention, Block

COLUMN, ROW, EMBEDDING = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"
MLP_SPLIT, ATTENTION_SPLIT, BLOCK_SPLIT = (
    f"parallelize_{kind}" for kind in ("mlp", "attention", "block")
)
LAYERS = COLUMN, ROW, EMBEDDING  # new ones are made from the full ones; the others split in place
NORMS = "attention_norm", "mlp_norm"
OF_LAYERS = dict.fromkeys(
    [f"{name}.{kind}" for name in ("query", "key", "value", "up") for kind in ("weight", "bias")], 0
) | {"out.weight": 1, "down.weight": 1}


@dataclass(frozen=True)
class Kind:
    """A way to split a module.

    Attributes:
        make: Builds the full module.
        parts: The split dim of the parameters, by the end of their names; others stay whole.
        x_dim, y_dim: The split dims of input and output; None if every rank has all of it.
    """

    make: Callable[..., nn.Module]
    parts: Mapping[str, int]
    x_dim: int | None = None
    y_dim: int | None = None

    def part_of(self, name: str) -> int | None:
        """The split dim of a parameter; None if every rank holds it whole."""
        return next((dim for end, dim in self.parts.items() if name.endswith(end)), None)


KINDS = {
    COLUMN: Kind(nn.Linear, {"weight": 0, "bias": 0}, None, -1),
    ROW: Kind(nn.Linear, {"weight": 1}, -1, None),
    EMBEDDING: Kind(nn.Embedding, {"weight": 0}),
    MLP_SPLIT: Kind(lambda width, _: MLP(width), OF_LAYERS),
    ATTENTION_SPLIT: Kind(Attention, OF_LAYERS),
    BLOCK_SPLIT: Kind(Block, OF_LAYERS, 1, 1),
}


@dataclass(frozen=True)
class Case:
    """A full module, and what it is given.

    Attributes:
        function: The name in the lesson of what splits it.
        sizes: Inputs and outputs of a linear layer, vocabulary and width of an embedding, width
            and heads of a transformer's module.
        rows: The dims of the input before its features.
        frozen: Ends of the names of parameters that are not trained.
        is_transposed: Whether input and gradient are transposed in memory, and the input is no
            leaf, so that nothing hinders a write into it.
        num_passes: The number of forward and backward passes, whose gradients add up.
    """

    function: str
    sizes: tuple[int, int]
    rows: tuple[int, ...]
    has_bias: bool = True
    gathers: bool = False
    frozen: tuple[str, ...] = ()
    is_input_trained: bool = True
    dtype: str = "float64"
    is_transposed: bool = False
    num_passes: int = 1

    def __str__(self) -> str:
        """Its words in a message."""
        extras = ["gather_output=True"] * self.gathers + ["no bias"] * (not self.has_bias)
        extras += [f"frozen {name}" for name in self.frozen]
        extras += ["an input without gradient"] * (not self.is_input_trained)
        extras += [self.dtype] * (self.dtype != "float64")
        extras += ["transposed"] * self.is_transposed
        extras += [f"{self.num_passes} passes"] * (self.num_passes > 1)
        x = f"x {[*self.x().shape]}"
        return ", ".join([self.function, self._size(), x, *extras])

    def _size(self) -> str:
        if self.function in LAYERS:
            return f"{self.kind.make.__name__}({self.sizes[0]}, {self.sizes[1]})"
        heads = f", {self.sizes[1]} heads" * (self.function != MLP_SPLIT)
        return f"width {self.sizes[0]}{heads}"

    @property
    def kind(self) -> Kind:
        """The way to split the module."""
        return KINDS[self.function]

    @property
    def y_dim(self) -> int | None:
        """The split dim of the output."""
        return None if self.gathers else self.kind.y_dim

    def full(self) -> nn.Module:
        """Build the full module, with numbers that do not depend on torch's generator."""
        module = self.kind.make(*self.sizes)
        for layer in module.modules():
            if not self.has_bias and isinstance(layer, nn.Linear):
                layer.bias = None  # type: ignore[assignment]
        module.to(getattr(torch, self.dtype))
        for seed, (name, parameter) in enumerate(module.named_parameters(), start=1):
            parameter.data = drawn(*parameter.shape, seed=seed).to(parameter.dtype)
            parameter.requires_grad_(not name.endswith(self.frozen or ("none",)))
        return module

    def x(self, step: int = 0) -> Tensor:
        """The full input of a pass; of tokens all in turn, from the last to the first."""
        if self.function == EMBEDDING:
            count = torch.Size(self.rows).numel()
            return (-1 - step - torch.arange(count)).remainder(self.sizes[0]).view(self.rows)
        return drawn(*self.rows, self.sizes[0], seed=61 + 2 * step).to(getattr(torch, self.dtype))

    def weights(self, step: int = 0) -> Tensor:
        """The factors of the full output in the loss: its gradient."""
        width = self.sizes[self.function in LAYERS]
        return drawn(*self.rows, width, seed=62 + 2 * step).to(getattr(torch, self.dtype))


def split_case(lesson: Any, case: Case, group: Any = None) -> dict[str, Any]:
    """Split a module and pass inputs through it, and gradients back; barriers lie between."""
    torch.manual_seed(
        place(group)[0]
    )  # a layer that draws new weights has others than the full one
    made, about, memory = _made(lesson, case, group)
    gc.collect()
    about["is_freed"] = all(storage.expired() for storage in memory)
    wrong = _wrong_shapes(made, case, place(group))
    passes = []
    for step in range(case.num_passes):
        with case_told(f"of {case}{wrong}", "a pass"):
            passes.append(_passed(made, case, step, group))
    return {**about, "passes": passes, "state": state_of(made)}


def _made(lesson: Any, case: Case, group: Any) -> tuple[Any, dict[str, Any], list[Any]]:
    """Split a module; return the result, its dependence on the full one, and the memory of that."""
    full = case.full()
    before, more = state_of(full), {"gather_output": True} if case.gathers else {}
    seen = list[list[int]]()
    for name in NORMS if case.function == BLOCK_SPLIT else ():  # before the hooks of the split
        getattr(full, name).register_forward_hook(lambda _, x, y: seen.append([*y.shape]))
    with case_told(f"of {case}"):
        result = getattr(lesson, case.function)(full, **given_group(group), **more)
    if case.function not in LAYERS:
        return full, {"norms": seen}, []
    is_kept, is_own = before == state_of(full), _is_untouched_by(full, result)
    memory = [StorageWeakRef(p.untyped_storage()) for p in full.parameters()]
    return result, {"is_kept": is_kept, "is_own": is_own}, memory


def _passed(made: Any, case: Case, step: int, group: Any) -> dict[str, Any]:
    """Output and gradient of one pass, and what has been changed."""
    place_ = place(group)
    x = _input(rank_part(case.x(step), *place_, case.kind.x_dim).clone(), case)
    gradient = laid_out(
        rank_part(case.weights(step), *place_, case.y_dim).clone(), case.is_transposed
    )
    with noting_changes(x=x, gradient=gradient) as changed:
        dist.barrier(group)
        output = returned(f"{case.function}.forward", made(x))
        dist.barrier(group)
        go_backward_with(output, gradient)
    return {
        "output": listed(output),
        "dtype": str(output.dtype).removeprefix("torch."),
        "has_graph": output.requires_grad,
        "input": listed(x.grad) if x.requires_grad else None,
        "is_alone": not x.requires_grad or is_alone_summed(x),
        "changed": changed,
    }


def _input(x: Tensor, case: Case) -> Tensor:
    x.requires_grad_(case.is_input_trained and x.is_floating_point())
    if case.is_transposed:
        x = laid_out(x.clone(), True)
        if x.requires_grad:
            x.retain_grad()
    return x


def _is_untouched_by(full: nn.Module, made: nn.Module) -> bool:
    """True if the parameters of a layer stay as they are while those of the full one are zero."""
    before = [listed(p) for p in made.parameters()]
    values = [p.detach().clone() for p in full.parameters()]
    for parameter in full.parameters():
        parameter.detach().zero_()
    during = [listed(p) for p in made.parameters()]
    for parameter, value in zip(full.parameters(), values, strict=True):
        parameter.detach().copy_(value)
    return before == during


def _wrong_shapes(made: nn.Module, case: Case, place: tuple[int, int]) -> str:
    """Say which parameters have not the shape of the rank's part; "" if all have."""
    expected = {
        name: [*rank_part(p, *place, case.kind.part_of(name)).shape]
        for name, p in case.full().named_parameters()
    }
    wrong = [
        f"{name} has the shape {[*p.shape]}, and should have {expected[name]}"
        for name, p in made.named_parameters()
        if [*p.shape] != expected.get(name, [*p.shape])
    ]
    return f": {', '.join(wrong)}" if wrong else ""


def refused_split(lesson: Any, case: Case) -> dict[str, Any]:
    """Return the error for a module that cannot be split, and whether it stays as before."""
    full = case.full()
    before = [id(module) for module in full.modules()]
    refusal = refusal_of(lambda: getattr(lesson, case.function)(full))
    is_kept = before == [id(module) for module in full.modules()]
    return {**refusal, "is_kept": is_kept and not any(m._forward_pre_hooks for m in full.modules())}


# 2.18: a cross-entropy


LOSS = "vocab_parallel_cross_entropy"


@dataclass(frozen=True)
class Scores:
    """Logits and targets of a vocabulary; some targets may be ignored."""

    vocabulary: int
    shape: tuple[int, ...]
    scale: float = 1.0
    offset: float = 0.0
    has_ignored: bool = False
    is_transposed: bool = False
    dtype: str = "float64"

    def __str__(self) -> str:
        """Its words in a message."""
        extras = [f"up to ±{self.scale:g}"] * (self.scale > 1)
        extras += [f"about {self.offset:g}"] * bool(self.offset)
        extras += ["some targets -100"] * self.has_ignored
        extras += ["transposed logits"] * self.is_transposed
        extras += [self.dtype] * (self.dtype != "float64")
        return ", ".join([f"{[*self.shape]} targets of {self.vocabulary} tokens", *extras])

    def logits(self) -> Tensor:
        """The full logits."""
        shape = *self.shape, self.vocabulary
        if self.is_transposed:
            shape = shape[1], shape[0], *shape[2:]
        logits = self.scale * drawn(*shape, seed=81) + self.offset
        logits = logits.to(getattr(torch, self.dtype))
        return logits.transpose(0, 1) if self.is_transposed else logits

    def targets(self) -> Tensor:
        """All tokens in turn; every third is ignored."""
        targets = torch.arange(torch.Size(self.shape).numel()).remainder(self.vocabulary)
        if self.has_ignored:
            targets[::3] = IGNORED
        return targets.view(self.shape)

    def weights(self) -> Tensor:
        """Factors of the losses."""
        return drawn(*self.shape, seed=82)


def loss_case(lesson: Any, case: Scores, group: Any = None) -> dict[str, Any]:
    """Compute the losses, and pass a gradient back; barriers lie between.

    Transposed logits are no leaf, so that nothing hinders a write into them.
    """
    part = rank_part(case.logits(), *place(group), -1)
    logits = (part if case.is_transposed else part.clone()).detach().requires_grad_()
    leaf, targets = logits, case.targets()
    logits = leaf.clone() if case.is_transposed else leaf
    with noting_changes(logits=logits, targets=targets) as changed:
        dist.barrier(group)
        function = lesson.vocab_parallel_cross_entropy
        losses = returned(LOSS, function(logits, targets, **given_group(group)))
        dist.barrier(group)
        if (losses.shape, losses.dtype) != (targets.shape, logits.dtype):
            raise WrongResult(
                f"there should be a loss for each target, {[*targets.shape]} in {logits.dtype}; "
                f"the losses have the shape {[*losses.shape]} and are {losses.dtype}"
            )
        (losses * case.weights()).sum().backward()
    return {"losses": listed(losses), "logits": listed(leaf.grad), "changed": changed}
