"""Bodies (functions that ranks run) for tasks 2.9 to 2.11, their models, and an ideal cluster."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from distlab.sim import Cluster
from distlab.sim.hardware.cluster import GPU
from judging.calls import case_told, cause_told, refusal_of, returned, typed
from judging.models import DOUBLE, gradients_of
from judging.tensors import given_group
from phase2.drawings import drawn
from phase2_advanced.given import Action, Batch, LossSum, Schedule, cross_entropy_sum

Rows = list[list[list[Any]]]  # for each stage, a row of [kind, micro-batch, chunk]


def rows_of_each(lesson: Any, function: str, sizes: list[list[int]]) -> list[Rows]:
    """Return the schedules that one of the lesson's functions makes for several sizes.

    Raises:
        WrongResult: A result is not a schedule.
    """
    return [_rows_of(lesson, function, *size) for size in sizes]


def _rows_of(lesson: Any, function: str, *numbers: int) -> Rows:
    schedule = returned(function, getattr(lesson, function)(*numbers))
    call = f"{function}({', '.join(map(str, numbers))})"
    if not isinstance(schedule, list) or not all(isinstance(row, list) for row in schedule):
        raise WrongResult(f"{call} should return a list of lists; it returned {schedule!r:.70}")
    return [[_plain(call, action) for action in row] for row in schedule]


def _plain(call: str, action: Any) -> list[Any]:
    kind, *numbers = (getattr(action, name, None) for name in ("kind", "micro_batch", "chunk"))
    if kind not in ("F", "B") or any(type(number) is not int for number in numbers):
        raise WrongResult(f"{call} should contain actions, as in Action('F', 0), not {action!r}")
    return [kind, *numbers]


WIDTH, CLASSES, LENGTH = 12, 3, 2
KINDS = ("dense", "tokens", "frozen", "checkpointed", "detached", "bfloat16")


class _Again(torch.autograd.Function):
    """Calls a layer without recording a graph.

    The backward pass calls the layer again, and runs a nested backward pass through it.
    """

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        if not torch.autograd._is_checkpoint_valid():  # torch's own checkpoint also refuses this
            raise RuntimeError("checkpointed layers need backward(), not torch.autograd.grad()")
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (ctx.layer(x) * gradient).sum().backward()  # backward(gradient) would import SymPy
        return None, x.grad


class Checkpointed(nn.Module):
    """A layer that keeps only its input for the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return _Again.apply(self.layer, x)


class Detached(nn.Module):
    """A cut in the graph: blocks before it require gradients but get none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Across(nn.Module):
    """Returns its input with a transposed memory layout, which is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT.contiguous().mT


class InDouble(nn.Module):
    """A float64 layer with bfloat16 input and output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double()).bfloat16()  # type: ignore[no-any-return]


def block(number: int, num_blocks: int, kind: str = "dense") -> nn.Module:
    """Build one block of a model, with the same weights on every rank."""
    torch.manual_seed(10 + number)
    is_last = number == num_blocks - 1
    linear = nn.Linear(WIDTH, CLASSES if is_last else WIDTH, **DOUBLE)
    layer: nn.Module = linear if is_last else nn.Sequential(linear, nn.Tanh())
    if kind == "frozen":
        linear.bias.requires_grad_(False)
        linear.weight.requires_grad_(is_last)
    if number == 0 and kind in ("tokens", "frozen"):
        embedding = nn.Embedding(7, WIDTH, **DOUBLE)
        embedding.weight.requires_grad_(kind == "tokens")
        return nn.Sequential(embedding, layer, Across())
    if is_last and kind == "detached":
        return nn.Sequential(Detached(), layer)
    if kind == "bfloat16":
        return InDouble(layer)
    return Checkpointed(layer) if number and kind == "checkpointed" else layer


def micro_batch(number: int, rows: int, kind: str = "dense") -> Batch:
    """Make a micro-batch of inputs, targets and loss weights; some of the targets do not count."""
    generator = torch.Generator().manual_seed(number)
    targets = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
    targets[torch.rand(rows, LENGTH, generator=generator) < 0.3] = -100
    targets[0, 0] = 1
    weights = torch.rand(rows, **DOUBLE, generator=generator)
    if kind in ("tokens", "frozen"):
        return torch.randint(7, (rows, LENGTH), generator=generator), targets, weights
    inputs = torch.randn(rows, LENGTH, WIDTH, generator=generator, **DOUBLE)
    return inputs, targets, weights


def _weighted_sum(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets, weights = batch
    errors = (model(inputs) - targets[..., None]).square().sum(dim=(1, 2))
    return (errors * weights).sum()


# A loss that uses all three tensors of a batch, and counts 3 targets per row.
weighted_sum = LossSum(_weighted_sum, lambda batch: 3 * len(batch[2]))


def loss_of(kind: str) -> LossSum:
    return cross_entropy_sum if kind == "tokens" else weighted_sum


def alone(num_blocks: int, sizes: Sequence[int], kind: str) -> dict[str, Any]:
    """Run all micro-batches in one process; return losses, target count, and gradients by block."""
    blocks = [block(number, num_blocks, kind) for number in range(num_blocks)]
    model, batches = nn.Sequential(*blocks), [micro_batch(*one, kind) for one in enumerate(sizes)]
    found = [loss_of(kind)(model, batch) for batch in batches]
    total, count = torch.stack([loss for loss, _ in found]).sum(), sum(int(n) for _, n in found)
    means = torch.stack([loss / n for loss, n in found])
    return {
        "loss": float(total.detach()) / count,
        "mean of means": float(means.detach().mean()),
        "last": float(means[-1].detach()),
        "targets": count,
        "gradients": _gradients_by_block(blocks, total / count),
        "gradients of means": _gradients_by_block(blocks, means.mean()),
    }


def _gradients_by_block(blocks: Sequence[nn.Module], loss: Tensor) -> list[dict[str, Any]]:
    for one in blocks:
        one.zero_grad()
    torch.autograd.backward(loss, retain_graph=True)
    return [gradients_of(one) for one in blocks]


CALLS = 2
ONE_ORDER = (
    "Messages between two ranks arrive in the order in which they were sent, so both ranks must "
    "follow one order of all messages, which timeline gives."
)
CAUSES = {
    "implicitly": "Backward got no gradient for an output. Did one arrive: does the result of B in "
    "block k go to block k-1, and is the input of every block but the first what the block before "
    "it returned? It may be missing only where the loss does not depend on its output; then skip "
    "backward.",
    "Mismatch in shape: grad_output": f"This is another micro-batch's gradient. {ONE_ORDER}",
    "The size of tensor a": f"Has the output of another micro-batch arrived? {ONE_ORDER}",
    "through the graph a second time": "Detach what goes from a block to the next, on the same "
    "rank too, so that each block has a graph of its own.",
}

NO_TARGETS = {
    "division": "Only the last block's rank knows the loss and the number of targets: every rank "
    "that divides needs them."
}
NOT_READ = {
    "NoneType": "If the None is a micro-batch's: only the rank of the first block reads the "
    "inputs. Only the rank of the last block reads the rest of a batch, and counts its targets. "
    "Elsewhere, None may stand in their place."
}

Case = tuple[str, Sequence[int], str]  # schedule as drawn; rows of micro-batches; kind of model


def run_pipelines(lesson: Any, cases: Sequence[Case], group: Any = None) -> list[dict[str, Any]]:
    """Run the schedule of each case twice; return the loss and this rank's gradients afterwards."""
    return [_run_pipeline(lesson, *case, group) for case in cases]


def _run_pipeline(
    lesson: Any, text: str, sizes: Sequence[int], kind: str, group: Any
) -> dict[str, Any]:
    chunks, batches = _mine(text, sizes, kind, group)
    calls: list[int] = []
    loss_sum = _noted(loss_of(kind), calls)
    case = f"of a {kind} model, with micro-batches of {[*sizes]} rows"
    with (
        case_told(case),
        cause_told(CAUSES),
        cause_told(NO_TARGETS, ZeroDivisionError),
        cause_told(NOT_READ, TypeError),
    ):
        for _ in range(CALLS):
            loss = lesson.run_schedule(drawn(text), chunks, batches, loss_sum, **given_group(group))
    number = typed("run_schedule", loss, float)
    gradients = [gradients_of(chunk) for chunk in chunks]
    return {"loss": number, "gradients": gradients, "losses": len(calls)}


def _noted(loss_sum: LossSum, calls: list[int]) -> LossSum:
    """Wrap a loss so that each call appends its number of targets to ``calls``."""

    def noted(model: nn.Module, batch: Batch) -> Tensor:
        loss, count = loss_sum(model, batch)
        calls.append(int(count))
        return loss

    noted.__name__ = "loss_sum"  # the name appears in error texts
    return LossSum(noted, loss_sum.count)


def _mine(text: str, sizes: Sequence[int], kind: str, group: Any) -> tuple[list[nn.Module], Any]:
    """Return this rank's blocks, and the micro-batches with None for tensors it may not read."""
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    v = 1 + max(action.chunk for actions in drawn(text) for action in actions)
    chunks = [block(chunk * p + rank, v * p, kind) for chunk in range(v)]
    if kind in ("frozen", "detached"):
        _give_old_gradients(chunks)
    batches = [micro_batch(*one, kind) for one in enumerate(sizes)]
    return chunks, [_seen(batch, rank == 0, rank == p - 1) for batch in batches]


def _give_old_gradients(chunks: Sequence[nn.Module]) -> None:
    for parameter in chain.from_iterable(chunk.parameters() for chunk in chunks):
        parameter.grad = torch.ones_like(parameter)


def _seen(batch: Batch, is_first: bool, is_last: bool) -> tuple[Tensor | None, ...] | None:
    if not is_first and not is_last:
        return None
    inputs, *rest = batch
    return (inputs if is_first else None, *(one if is_last else None for one in rest))


def refusals(lesson: Any, texts: Sequence[str], num_micro_batches: int) -> list[dict[str, str]]:
    """Return the errors for schedules that do not fit the micro-batches and the ranks."""
    chunks = [block(dist.get_rank(), dist.get_world_size())]
    batches = [micro_batch(i, 3 + i) for i in range(num_micro_batches)]
    return [
        refusal_of(lambda text=text: lesson.run_schedule(drawn(text), chunks, batches, loss_of("")))
        for text in texts
    ]


# Ideal cluster: only matrix products take time. Blocks are wide inside, with narrow ends.

NARROW, WIDE, DEPTH, ROWS = 2, 64, 5, 8
BLOCK_BYTES = 4 * ROWS * WIDE * DEPTH  # activations of one micro-batch in one block
BLOCK_FLOPS = 2 * ROWS * WIDE * (2 * NARROW + WIDE * (DEPTH - 1))  # of a block's forward pass
ENDLESS, FLOPS_PER_S = 1e30, 1e6
SPEED = {"float32": FLOPS_PER_S}
IDEAL_GPU = GPU("ideal", ENDLESS, ENDLESS, SPEED, SPEED)


def ideal(num_ranks: int) -> Cluster:
    return Cluster(
        1, num_ranks, gpu=IDEAL_GPU, latency_s=0.0, nvlink_bytes_per_s=ENDLESS, name="ideal"
    )


class Shift(nn.Module):
    """Adds a parameter, so that the first block's backward pass takes as long as the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(NARROW))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def _wide_block() -> nn.Sequential:
    inside = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEPTH - 1)]
    ends = nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)
    return nn.Sequential(Shift(), ends[0], *inside, ends[1])


def _sum_of_squares(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).square().sum()


SQUARES = LossSum(_sum_of_squares, lambda batch: len(batch[1]))


def run_ideal(lesson: Any, text: str, num_micro_batches: int, num_chunks: int) -> float:
    """Run a pipeline of equal blocks once; return the loss."""
    torch.manual_seed(dist.get_rank())
    chunks = [_wide_block() for _ in range(num_chunks)]
    batches = [(torch.ones(ROWS, NARROW),) * 2 for _ in range(num_micro_batches)]
    loss = lesson.run_schedule(drawn(text), chunks, batches, SQUARES)
    return typed("run_schedule", loss, float)


# Memory: with one micro-batch at a time, only the last message may still be held.

KEPT_ROWS, KEPT_WIDTH = 2_000, 8
KEPT_BYTES = 4 * KEPT_ROWS * KEPT_WIDTH  # size of an output, and of a gradient


def one_at_a_time(num_stages: int, num_micro_batches: int) -> Schedule:
    actions = [Action(kind, i) for i in range(num_micro_batches) for kind in "FB"]
    return [actions] * num_stages


def run_one_at_a_time(lesson: Any, num_micro_batches: int) -> float:
    """Run a pipeline one micro-batch at a time, always with the same tensors; return the loss."""
    p = dist.get_world_size()
    chunks = [nn.Sequential(nn.Linear(KEPT_WIDTH, KEPT_WIDTH), nn.Tanh())]
    batches = [(torch.ones(KEPT_ROWS, KEPT_WIDTH),) * 2] * num_micro_batches
    schedule = one_at_a_time(p, num_micro_batches)
    loss = lesson.run_schedule(schedule, chunks, batches, SQUARES)
    return typed("run_schedule", loss, float)
