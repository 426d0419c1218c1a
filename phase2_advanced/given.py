"""What phase 2 gives you: types, losses, and small models to split.

It contains no task, so leave it as it is. Submissions are graded with the course's own copy.
"""

import inspect
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils._pytree import tree_flatten, tree_unflatten

Batch = tuple[Tensor, ...]  # inputs (B, …), targets (B, …), and whatever else has B rows
Group = dist.ProcessGroup | None  # None: all ranks
AllReduce = Callable[[Tensor, Group], None]  # sums a tensor over the group, in place
LossSum = Callable[[nn.Module, Batch], tuple[Tensor, int]]  # sum of losses, number of targets


def all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over the ranks of ``group``, in place: torch's own, as lessons take it."""
    dist.all_reduce(x, group=group)


def cross_entropy_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropies of a batch, and how many targets it has.

    Args:
        model: maps inputs to logits (…, classes).
        batch: inputs, and targets (…) int64; a target of -100 does not count.

    Returns:
        A scalar of the logits' dtype, through which backward can go; the number of targets.
    """
    inputs, targets = batch[:2]
    logits: Tensor = model(inputs)
    total = cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, int(torch.count_nonzero(targets != -100))


# Gradient accumulation


# Mixed precision


class StepResult(NamedTuple):
    """What a step in mixed precision reports, the same on every rank."""

    loss: float  # mean over the targets of all ranks, before the step; not scaled
    is_skipped: bool  # whether some gradient was not finite, so that nothing has changed
    norm: float  # of the averaged and unscaled gradient, before clipping; not finite if skipped


# Activation checkpointing


def take_tensors(value: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Take the tensors out of a value: those inside tuples, lists and dicts too.

        (x, {"mask": m, "scale": 2.0})    ->  [x, m], put_back
        put_back([y, n])                  ->  (y, {"mask": n, "scale": 2.0})

    Returns:
        The tensors, and a function that returns the value with other tensors in their places. It
        does not keep the tensors that were taken out.
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
    """Return torch's generators from which a computation with ``tensors`` may draw.

    These are the CPU's, and those of the GPUs that the tensors are on.
    """
    gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    return [torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)]


# Model parallelism


def group_device(group: Group = None) -> torch.device:
    """Return where tensors must be to travel in ``group``: this rank's GPU with NCCL, else CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


# Pipeline parallelism


class Action(NamedTuple):
    """One pass of a micro-batch through a chunk of a stage: ``F0`` forward, ``B0.1`` backward."""

    kind: str  # "F" or "B"
    micro_batch: int
    chunk: int = 0  # of the stage's chunks; most schedules have only one

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = list[list[Action]]  # by stage: its actions, in order


class Event(NamedTuple):
    """At ``time``, a stage starts an action, or has ended it."""

    time: int
    is_start: bool
    stage: int
    action: Action


def timeline(schedule: Schedule, backward_time: int = 2) -> list[Event]:
    """Return in which order the stages of a pipeline start and end their actions.

    A forward pass takes 1 and a backward pass ``backward_time``, because it computes twice as much;
    messages take nothing. A stage starts an action as soon as the one before it in its list has
    ended, and what it needs exists. An action that never can start has no event.

    With p stages, chunk c of stage s is block c·p+s of the model. Forward, a block needs the output
    of the block before it. Backward, it needs its own forward pass and the gradient from the block
    after it.
    """
    num_blocks = len(schedule) * (1 + max((a.chunk for row in schedule for a in row), default=0))
    waiting = [deque(actions) for actions in schedule]
    ends: dict[tuple[int, Action], int] = {}
    is_free = [0] * len(schedule)  # from when on
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
    """Return the stages and actions whose results an action uses."""
    is_forward = action.kind == "F"
    block = action.chunk * num_stages + stage + (-1 if is_forward else 1)
    needs = set() if is_forward else {(stage, action._replace(kind="F"))}
    if 0 <= block < num_blocks:
        needs.add((block % num_stages, action._replace(chunk=block // num_stages)))
    return needs


def grid(schedule: Schedule) -> str:
    """Draw a schedule: a row for each stage, and a column for each pass if all take equally long.

    Two stages and one micro-batch; a stage that waits forever ends with what it waits to start:
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
    """Work on each position alone: up to four times the width, a non-linearity, and down again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class Attention(nn.Module):
    """Mix each position with those before it, in heads that do not see each other.

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
    """Add attention, then the MLP, to the stream; each sees it normalised (pre-norm)."""

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


# Programs: what the ``main`` functions of the lessons share


def load_digits(rows: int = 512) -> Batch:
    """Return the first of scikit-learn's digits: pixels (rows, 64) from 0 to 1, labels (rows,).

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = find_spec("sklearn")  # only its file is needed: importing it takes a second per rank
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", max_rows=rows)).to(group_device())
    return table[:, :-1] / 16, table[:, -1].long()


def digit_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Return the layers of a classifier of digits, in float64 and the same on every rank.

    As in a transformer, a layer is four times as wide inside as its input; the last is linear.

    Args:
        widths: of what goes into each layer; the last returns 10 logits.
    """
    torch.manual_seed(0)
    layers = [
        nn.Sequential(_linear(m, 4 * m), nn.Tanh(), _linear(4 * m, n)) for m, n in pairwise(widths)
    ]
    return [*layers, _linear(widths[-1], 10)]


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, dtype=torch.float64)
    nn.init.xavier_normal_(layer.weight)  # torch's own is too small for many layers with tanh
    return layer.to(group_device())


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers a module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all programs: its steps are the same for a model and its parts."""
    return torch.optim.Adam(module.parameters(), lr=0.003)


def train(model: nn.Module, num_steps: int) -> list[float]:
    """Train on all digits of ``load_digits`` at once, without pipeline; return the losses."""
    (images, labels), optimizer = load_digits(), optimizer_for(model)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(model: nn.Module, num_steps: int) -> None:
    """Train on rank 0 as one process would, and give all ranks its weights."""
    if dist.get_rank() == 0:
        train(model, num_steps)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def require_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """``fail`` on all ranks unless every rank's weights are those of one process.

    Args:
        ours: this rank's weights, in float64.
        theirs: the same weights of the model that one process has trained.
    """
    pairs = [(x.detach(), y.detach()) for x, y in zip(ours, theirs, strict=True)]
    ok = all(torch.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in pairs)
    wrong = [rank for rank, is_ok in enumerate(from_all_ranks(ok)) if not is_ok]
    if wrong:
        fail(f"after training, the weights of ranks {wrong} are not those of one process")


def from_all_ranks(number: float) -> list[float]:
    """Return the number of each rank, on all ranks."""
    mine = torch.tensor([number], dtype=torch.float64, device=group_device())
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, mine)
    return [float(other) for other in numbers]


def by_rank(number: float, form: str = ",.0f") -> str:
    """Write down the number of each rank; all ranks must call this."""
    return "  ".join(format(other, form) for other in from_all_ranks(number))


def say(text: str) -> None:
    """Print a line on rank 0 only: lines of several processes would mix."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def say_loss(first: float, last: float) -> None:
    """Print the first and the last loss, after ``require_equal``."""
    say(f"loss:                 {first:.3f} -> {last:.3f}, and the weights of one process")


def fail(problem: object) -> NoReturn:
    """End the program on all ranks, which must all call this; rank 0 says why in one line."""
    if dist.get_rank() == 0:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)
    dist.barrier()  # the first rank that ends takes the others with it: rank 0 must have spoken
    dist.destroy_process_group()
    raise SystemExit(1) from None


def positive(text: str) -> int:
    """Read an option that must be 1 or more.

    Raises:
        ValueError: it is not.
    """
    number = int(text)
    if number < 1:
        raise ValueError
    return number


class Checkpointed(nn.Module):
    """Calls a module through ``checkpoint``."""

    def __init__(self, module: nn.Module, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.checkpoint = module, checkpoint

    def forward(self, *inputs: Tensor) -> Any:
        return self.checkpoint(self.module, *inputs)


class Meter:
    """Measures what a rank does in its steps.

    Attributes:
        total_s: the time of all steps, by the clock of ``time.perf_counter``.
        busy_s: how much of it ``modules`` have computed, forward and backward. In the rest, the
            rank has sent, received and waited.
        peak_bytes: what autograd has kept at the same time for backward passes, at most.
            Parameters do not count: they are there anyway.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.total_s = self.busy_s = self._since = 0.0
        self.peak_bytes = self._bytes = 0
        self._keepers: Counter[int] = Counter()  # by address
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._start())
            module.register_forward_hook(self._after_forward)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._add())
        self._parameters = {parameter.data_ptr() for parameter in parameters}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step: forward and backward passes."""
        start = time.perf_counter()
        with saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield
        self.total_s += time.perf_counter() - start

    def _start(self) -> None:
        self._since = time.perf_counter()

    def _add(self) -> None:
        now = time.perf_counter()
        self.busy_s, self._since = self.busy_s + now - self._since, now

    def _after_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._add()
        if output.requires_grad:
            output.register_hook(lambda _: self._start())  # then the backward pass comes here

    def _keep(self, x: Tensor) -> "_Kept":
        kept = _Kept(x.detach())
        if x.data_ptr() not in self._parameters:
            self._bytes += 0 if self._keepers[x.data_ptr()] else x.nbytes
            self._keepers[x.data_ptr()] += 1
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            weakref.finalize(kept, self._free, x.data_ptr(), x.nbytes)
        return kept

    def _free(self, address: int, num_bytes: int) -> None:
        self._keepers[address] -= 1
        self._bytes -= 0 if self._keepers[address] else num_bytes


@dataclass(eq=False)
class _Kept:
    """What autograd keeps; it is freed with the graph."""

    tensor: Tensor


def report(meter: Meter) -> None:
    """Print what the ranks have kept for backward passes, and how long they have waited."""
    waited = 1 - meter.busy_s / meter.total_s
    say(f"kept for backward:    {by_rank(meter.peak_bytes / 1000)} kB at most")
    say(f"waited or sent:       {by_rank(waited, '.0%')} of the time")


@contextmanager
def calls_of(function: Callable[..., Any]) -> Iterator[list[dict[str, Any]]]:
    """List the arguments of all calls of a Python function by this rank, even in backward."""
    calls, code = [], inspect.unwrap(function).__code__

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(dict(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        with set_multithreading_enabled(False):  # backward in this thread, on a GPU too
            yield calls
    finally:
        sys.setprofile(before)
