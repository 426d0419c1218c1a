"""The code that phase 2 gives you: types, losses, and small models to split.

It contains no task, so leave it as it is: submissions are graded with the course's own copy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils._pytree import tree_flatten, tree_unflatten

Batch = tuple[Tensor, ...]  # inputs (B, …), targets (B, …), and any other tensors with B rows
Group = dist.ProcessGroup | None  # None: all ranks


class AllReduce(Protocol):
    """Sums a tensor over the group, in place."""

    def __call__(self, x: Tensor, /, group: Group = None) -> None: ...


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place, with torch's own all-reduce."""
    dist.all_reduce(x, group=group)


@dataclass(frozen=True)
class LossSum:
    """A loss that is summed over targets, and that can count them before the model has run.

        loss_sum.count(batch)                       ->  how many targets the batch has
        loss, num_targets = loss_sum(model, batch)  ->  the sum of their losses, and how many

    Args:
        sum_of: function that runs the model on a batch, and returns the sum of the losses, a scalar
            ready for ``backward``.
        count: function that returns the number of targets in any rows of a batch. It runs no model
            and reads no inputs, which may be None. The number is an int or, on a GPU, an int64
            tensor there, because the host would have to wait for an int.
    """

    sum_of: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], int | Tensor]

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int | Tensor]:
        """Return the sum of the losses of a batch, and the number of its targets."""
        return self.sum_of(model, batch), self.count(batch)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch[:2]
    logits: Tensor = model(inputs)
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def _count_labels(batch: Batch) -> int | Tensor:
    count = torch.count_nonzero(batch[1] != -100)
    return count if count.is_cuda else int(count)


# The cross-entropy of logits (…, classes) and targets (…) int64, in the dtype of the logits. A
# target of -100 does not count.
cross_entropy_sum = LossSum(_cross_entropy, _count_labels)


# Mixed precision


class StepResult(NamedTuple):
    """Result of a step in mixed precision, the same on every rank."""

    loss: float  # mean over the targets of all ranks, before the step; not scaled
    is_skipped: bool  # True if the step was skipped because a gradient was not finite
    norm: float  # norm of the averaged, unscaled gradient before clipping; not finite if skipped


# Activation checkpointing


def take_tensors(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Take the tensors out of a value, including those inside tuples, lists and dicts.

        (x, {"mask": m, "scale": 2.0})    ->  [x, m], put_back
        put_back([y, n])                  ->  (y, {"mask": n, "scale": 2.0})

    Returns:
        The tensors, and a function that returns the value with other tensors in their places. The
        function holds no references to the tensors that were taken out.
    """
    leaves, spec = tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def put_back(others: Sequence[Tensor]) -> Any:
        filled = [*rest]
        for place, tensor in zip(places, others, strict=True):
            filled[place] = tensor
        return tree_unflatten(filled, spec)

    return tensors, put_back


def generators_of(tensors: Sequence[Tensor]) -> list[torch.Generator]:
    """Return the torch generators that a computation with ``tensors`` may draw from.

    These are the CPU's generator and those of the GPUs that the tensors are on.
    """
    gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    return [torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)]


# Model parallelism


def group_device(group: Group = None) -> torch.device:
    """Return the device for tensors sent in ``group``: this rank's GPU with NCCL, else the CPU."""
    has_nccl = dist.get_backend(group) == "nccl" or "cuda:nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


# Pipeline parallelism


class Action(NamedTuple):
    """A micro-batch's pass through a chunk, such as ``F0`` (forward) or ``B0.1`` (backward)."""

    kind: str  # "F" or "B"
    micro_batch: int
    chunk: int = 0  # index of the chunk in its stage; most schedules have one per stage

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")

    def __repr__(self) -> str:  # short, for lists and messages
        return str(self)


Schedule = list[list[Action]]  # actions of each stage, in order


class Event(NamedTuple):
    """The start or the end of a stage's action, at ``time``."""

    time: int
    is_start: bool
    stage: int
    action: Action


def timeline(schedule: Schedule, backward_time: int = 2) -> list[Event]:
    """Return when the stages of a pipeline start and end their actions, in order of time.

    A forward pass takes one unit of time, a backward pass ``backward_time`` (by default 2, because
    it computes twice as much), and messages take no time. A stage starts its next action as soon as
    the previous one has ended and the results that the next one needs exist. An action that can
    never start has no events.

    With p stages, chunk c of stage s is block c·p+s of the model. In a forward pass, a block needs
    the output of the block before it. In a backward pass, it needs the results of its own forward
    pass and the gradient from the block after it.
    """
    num_blocks = len(schedule) * (1 + max((a.chunk for row in schedule for a in row), default=0))
    waiting = [deque(actions) for actions in schedule]
    ends: dict[tuple[int, Action], int] = {}
    is_free = [0] * len(schedule)  # time from which each stage is free again
    events = []
    while ready := [
        stage
        for stage, actions in enumerate(waiting)
        if actions and _needs(stage, actions[0], len(schedule), num_blocks) <= ends.keys()
    ]:
        for stage in ready:
            action = waiting[stage].popleft()
            needs = _needs(stage, action, len(schedule), num_blocks)
            start = max([is_free[stage], *(ends[need] for need in needs)])
            end = start + (backward_time if action.kind == "B" else 1)
            ends[stage, action] = is_free[stage] = end
            events += [Event(start, True, stage, action), Event(end, False, stage, action)]
    return sorted(events)


def _needs(stage: int, action: Action, num_stages: int, num_blocks: int) -> set[tuple[int, Action]]:
    """Return the actions whose results an action uses, each with its stage."""
    is_forward = action.kind == "F"
    block = action.chunk * num_stages + stage + (-1 if is_forward else 1)
    needs = set() if is_forward else {(stage, action._replace(kind="F"))}
    if 0 <= block < num_blocks:
        needs.add((block % num_stages, action._replace(chunk=block // num_stages)))
    return needs


def grid(schedule: Schedule) -> str:
    """Draw a schedule, with a row per stage and a column per time unit; each pass takes one unit.

    Two examples with two stages and one micro-batch. In the second, stage 0 waits forever, so its
    row ends with the action that it cannot start:
        F0 .  .  B0          F0 B0?
        .  F0 B0 .           .  F0
    """
    starts = [event for event in timeline(schedule, backward_time=1) if event.is_start]
    rows = [["."] * (1 + max((start.time for start in starts), default=-1)) for _ in schedule]
    for start in starts:
        rows[start.stage][start.time] = str(start.action)
    for stage, actions in enumerate(schedule):
        done = sum(start.stage == stage for start in starts)
        if done < len(actions):
            last = max((i for i, cell in enumerate(rows[stage]) if cell != "."), default=-1)
            rows[stage][last + 1 :] = [f"{actions[done]}?"]
    width = max((len(str(action)) for actions in schedule for action in actions), default=0)
    return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)


# Tensor parallelism


class MLP(nn.Module):
    """Processes each position by itself: widens it fourfold, applies gelu, and narrows it again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class Attention(nn.Module):
    """Mixes each position with those before it, in independent heads.

    The number of heads follows from the size of ``query``: with 1/N of the rows of query, key and
    value, and of the columns of ``out``, the same code computes 1/N of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, head width)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def _split(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, heads, T, head width)
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class Block(nn.Module):
    """Adds attention, then the MLP, to the residual stream, with a norm before each (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y
