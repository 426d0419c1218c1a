"""Bodies (functions that ranks run) for tasks 2.12 to 2.17: regions, split modules and losses."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from distlab.grade import WrongResult
from judging.calls import case_told, cause_told, refusal_of, returned
from judging.comparing import noting_changes
from judging.models import IGNORED
from judging.tensors import given_group
from phase2_advanced.given import MLP, Attention, Block


def drawn(*shape: int, seed: int) -> Tensor:
    """Draw numbers from -1 to 1 in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1


def laid_out(x: Tensor, is_transposed: bool) -> Tensor:
    """Return ``x``, with a memory layout that is not contiguous if ``is_transposed``."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if is_transposed else x


def rank_part(full: Tensor, rank: int, n: int, dim: int | None) -> Tensor:
    """Return the rank's shard along a dim, or the whole tensor if the dim is None."""
    return full if dim is None else full.chunk(n, dim)[rank]


def place(group: Any) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's number of ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def listed(tensor: Any) -> Any:
    """Return a tensor as nested lists, and anything else as it is."""
    return tensor.detach().tolist() if isinstance(tensor, Tensor) else tensor


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the values, gradient, dtype and bytes of each parameter, by name."""
    return {name: _description_of(p) for name, p in module.named_parameters()}


def _description_of(parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "values": listed(parameter),
        "gradient": listed(parameter.grad),
        "is_trained": parameter.requires_grad,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "num_bytes": parameter.nbytes,
        "held_bytes": parameter.untyped_storage().nbytes(),
    }


class _End(torch.autograd.Function):
    """The end of a graph; its backward pass returns the given gradient without copying it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def go_backward_with(y: Tensor, gradient: Tensor) -> None:
    """Do what ``y.backward(gradient)`` does, but without loading SymPy.

    An output that has no graph or the wrong shape is skipped; the judge reports it.
    """
    if y.requires_grad and y.shape == gradient.shape:
        _End.apply(y, gradient).backward()  # type: ignore[no-untyped-call]


def is_alone_summed(x: Tensor) -> bool:
    """Return whether a gradient from another user of ``x`` reaches it unchanged.

    ``x.grad`` is restored afterwards.
    """
    before, x.grad = x.grad, None
    gradient = x.detach().clone()
    go_backward_with(x, gradient)
    found, x.grad = x.grad, before
    return torch.equal(found, gradient) if found is not None else False


INFINITE, UNTRAINED, NUMBER, SHORT = "infinite on rank 0", "no gradient needed", "a number", "short"
INNER = "inside of a graph"  # not a leaf, so autograd allows in-place writes
SEQUENCE_KINDS = ("contiguous", "transposed", "expanded gradient", INNER, "bfloat16", UNTRAINED)
SEQUENCE_KINDS = (*SEQUENCE_KINDS, "float32", SHORT)
REGION_KINDS = (*SEQUENCE_KINDS, NUMBER, INFINITE)


def shape_of(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a kind of tensor, which is ``shape`` for most kinds."""
    return {NUMBER: (), SHORT: (1, shape[1] // 2)}.get(kind, shape)


def tensor_of(kind: str, rank: int, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor of small multiples of 1/8, whose sums are exact in every dtype.

    If ``kind`` is ``INFINITE``, the tensor of rank 0 is infinite instead.
    """
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
    """Pass every kind of tensor forward through a region; after a barrier, pass gradients back.

    Args:
        shapes: The shapes of input and output.
    """
    rank, _ = place(group)
    given = [_input_of_region(kind, tensor_of(kind, rank, 0, shapes[0])) for kind in kinds]
    gradients = [tensor_of(kind, rank, 1, shapes[1]) for kind in kinds]
    before = [listed(x) for x in given]
    arriving = [listed(gradient) for gradient in gradients]
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
        entry |= {"x": before[i], "gradient": arriving[i], "x_grad": listed(x.grad)}
        entry["changed"] = [name for name in ("x", "gradient") if f"{name} {i}" in changed]
        entry["is_alone"] = not x.requires_grad or is_alone_summed(x)
    return found


def _input_of_region(kind: str, x: Tensor) -> Tensor:
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


COLUMN, ROW, EMBEDDING = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"
MLP_SPLIT, ATTENTION_SPLIT, BLOCK_SPLIT = (
    f"parallelize_{kind}" for kind in ("mlp", "attention", "block")
)
LAYERS = COLUMN, ROW, EMBEDDING  # these make new modules; others split the full one in place
NORMS = "attention_norm", "mlp_norm"
OF_LAYERS = dict.fromkeys(
    [f"{name}.{kind}" for name in ("query", "key", "value", "up") for kind in ("weight", "bias")], 0
) | {"out.weight": 1, "down.weight": 1}


@dataclass(frozen=True)
class Kind:
    """A way to split a module.

    Attributes:
        make: Builds the full module.
        parts: For each suffix of a parameter's name, the dim along which the parameter is split.
            All other parameters stay whole.
        x_dim: The dim along which the input is split, or None if every rank has all of it.
        y_dim: The same for the output.
    """

    make: Callable[..., nn.Module]
    parts: Mapping[str, int]
    x_dim: int | None = None
    y_dim: int | None = None

    def part_of(self, name: str) -> int | None:
        """Return the dim along which a parameter is split, or None if every rank has all of it."""
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
    """A full module, the way to split it, and its input.

    Attributes:
        function: The name of the lesson's function or class that splits the module.
        sizes: The numbers of inputs and outputs of a linear layer, the vocabulary and width of an
            embedding, or the width and number of heads of a transformer's module.
        rows: The input's dims, except for its features, which come last.
        frozen: Suffixes of the names of parameters that are not trained.
        is_transposed: Whether input and gradient are transposed in memory. The input is then not a
            leaf, so autograd allows in-place writes.
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
        """Return a description to use in messages."""
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
        """The dim along which the output is split, or None if every rank has all of it."""
        return None if self.gathers else self.kind.y_dim

    def full(self) -> nn.Module:
        """Build the full module, with values that do not depend on torch's generator."""
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
        """Return the full input of a pass; an embedding's token ids count down from the last."""
        if self.function == EMBEDDING:
            count = torch.Size(self.rows).numel()
            return (-1 - step - torch.arange(count)).remainder(self.sizes[0]).view(self.rows)
        return drawn(*self.rows, self.sizes[0], seed=61 + 2 * step).to(getattr(torch, self.dtype))

    def weights(self, step: int = 0) -> Tensor:
        """Return the gradient to pass back from the full output."""
        width = self.sizes[self.function in LAYERS]
        return drawn(*self.rows, width, seed=62 + 2 * step).to(getattr(torch, self.dtype))


def split_cases(lesson: Any, cases: Sequence[Case], group: Any = None) -> list[dict[str, Any]]:
    """Split a module for each case; pass inputs forward and gradients back.

    There is a barrier before each split, and before and after each forward pass.
    """
    return [_split_case(lesson, case, group) for case in cases]


def _split_case(lesson: Any, case: Case, group: Any) -> dict[str, Any]:
    dist.barrier(group)
    torch.manual_seed(place(group)[0])  # if a layer draws new weights, they differ by rank
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
    """Split a module; return the result, other observations, and the full module's memory.

    The memory is returned as weak references, which do not keep it alive.
    """
    full = case.full()
    before, more = state_of(full), {"gather_output": True} if case.gathers else {}
    seen = list[list[int]]()
    # Register these hooks before the split registers its own.
    for name in NORMS if case.function == BLOCK_SPLIT else ():
        getattr(full, name).register_forward_hook(lambda _, x, y: seen.append([*y.shape]))
    with case_told(f"of {case}"):
        result = getattr(lesson, case.function)(full, **given_group(group), **more)
    if case.function not in LAYERS:
        return full, {"norms": seen}, []
    is_kept = before == state_of(full)
    memory = [StorageWeakRef(p.untyped_storage()) for p in full.parameters()]
    return result, {"is_kept": is_kept}, memory


def _passed(made: Any, case: Case, step: int, group: Any) -> dict[str, Any]:
    """Return the output and gradients of one pass, and the names of changed tensors."""
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


def _wrong_shapes(made: nn.Module, case: Case, place: tuple[int, int]) -> str:
    """Describe the parameters that do not have the shape of this rank's shard, or return ""."""
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
    """Return the error for a module that cannot be split, and whether it is unchanged."""
    full = case.full()
    before = [id(module) for module in full.modules()]
    refusal = refusal_of(lambda: getattr(lesson, case.function)(full))
    is_kept = before == [id(module) for module in full.modules()]
    return {**refusal, "is_kept": is_kept and not any(m._forward_pre_hooks for m in full.modules())}


# Task 2.16: a cross-entropy


LOSS = "vocab_parallel_cross_entropy"


@dataclass(frozen=True)
class Scores:
    """Logits and targets over a vocabulary; some targets may be ignored."""

    vocabulary: int
    shape: tuple[int, ...]
    scale: float = 1.0
    offset: float = 0.0
    has_ignored: bool = False
    is_transposed: bool = False
    dtype: str = "float64"

    def __str__(self) -> str:
        """Return a description to use in messages."""
        extras = [f"up to ±{self.scale:g}"] * (self.scale > 1)
        extras += [f"about {self.offset:g}"] * bool(self.offset)
        extras += ["some targets -100"] * self.has_ignored
        extras += ["transposed logits"] * self.is_transposed
        extras += [self.dtype] * (self.dtype != "float64")
        return ", ".join([f"{[*self.shape]} targets of {self.vocabulary} tokens", *extras])

    def logits(self) -> Tensor:
        """Return the full logits."""
        shape = *self.shape, self.vocabulary
        if self.is_transposed:
            shape = shape[1], shape[0], *shape[2:]
        logits = self.scale * drawn(*shape, seed=81) + self.offset
        logits = logits.to(getattr(torch, self.dtype))
        return logits.transpose(0, 1) if self.is_transposed else logits

    def targets(self) -> Tensor:
        """Return targets that cycle through the tokens; if ``has_ignored``, ignore every third."""
        targets = torch.arange(torch.Size(self.shape).numel()).remainder(self.vocabulary)
        if self.has_ignored:
            targets[::3] = IGNORED
        return targets.view(self.shape)

    def weights(self) -> Tensor:
        """Return the factor by which each loss is multiplied before the backward pass."""
        return drawn(*self.shape, seed=82)


def loss_case(lesson: Any, case: Scores, group: Any = None) -> dict[str, Any]:
    """Compute the losses between two barriers, and pass a gradient back.

    Transposed logits are not a leaf, so autograd allows in-place writes.
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
