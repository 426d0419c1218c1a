"""Bodies for task 4.13: both kinds of data parallelism, with a hook and known gradients."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.calls import returned
from phase4_production.given import Piece, Reduced

SHAPES = {
    "conv.weight": (4, 3, 2, 2),  # channels_last: in memory, it lies in another order
    "first.weight": (6, 8),
    "first.bias": (6,),
    "scale": (),
    "second.weight": (8, 6),
    "second.bias": (6,),
}
USED = ("first.bias", "scale", "second.weight", "conv.weight", "second.bias", "first.weight")
BUCKETS = (
    (("second.bias", "second.weight"), ("scale", "first.bias", "first.weight"), ("conv.weight",)),
    (("first.weight", "second.bias"), ("conv.weight", "second.weight"), ("scale", "first.bias")),
)  # of the first step, and of all later ones
BUCKET_BYTES = 240
GRAIN, FRACTION = 8.0, 1 / 128  # what is sent, and what gradients are, multiples of
TORCHS, COURSES = "torch's DistributedDataParallel", "that of task 3.12"


class Plan(NamedTuple):
    """How it is trained.

    Attributes:
        door: TORCHS or COURSES.
        reduce: the name of one of ``REDUCES``.
        steps: how many.
        dtype: of parameters and gradients.
        seed: of the gradients.
        unused: of these parameters, rank 1 has no gradients in odd steps.
        restart: before this step, all begins anew from a state; -1: never.
        spoiled: in this step, each gradient of rank 0 holds a NaN; -1: never.
    """

    door: str
    reduce: str = "coarse"
    steps: int = 6
    dtype: str = "float32"
    seed: int = 0
    unused: tuple[str, ...] = ()
    restart: int = -1
    spoiled: int = -1


def gradients_of(plan: Plan, rank: int, step: int) -> dict[str, Tensor]:
    """Draw a rank's gradients: multiples of 1/128, exact in bfloat16; not so their sums."""
    found = {}
    for place, (name, shape) in enumerate(SHAPES.items()):
        seed = 1_000_000 * plan.seed + 10_000 * step + 100 * place + rank
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-255, 256, shape, generator=generator) * FRACTION
        found[name] = numbers * (not is_unused(plan, name, rank, step))
        if (rank, step) == (0, plan.spoiled):
            found[name].view(-1)[0] = math.nan
    return found


def is_unused(plan: Plan, name: str, rank: int, step: int) -> bool:
    """Whether a rank does not use a parameter in a step."""
    return name in plan.unused and rank == 1 and step % 2 == 1


# What compresses


class Coarse:
    """Sends multiples of ``GRAIN``, and notes what it got. It has no state of its own."""

    def __init__(self, group: Any) -> None:
        self.group, self.got = group, dict[str, Tensor]()
        self.dtypes = set[str]()

    def __call__(self, gradient: Tensor, pieces: Sequence[Piece]) -> Reduced:
        self._note(gradient, pieces)
        sent = self._sent(gradient)
        mean = sent.clone()
        dist.all_reduce(mean, group=self.group)
        return Reduced(mean / dist.get_world_size(self.group), sent)

    def _note(self, gradient: Tensor, pieces: Sequence[Piece]) -> None:
        sizes = [piece.shape.numel() for piece in pieces]
        if sum(sizes) != gradient.numel():
            raise WrongResult(
                f"the pieces {[(name, (*shape,)) for name, shape in pieces]} have {sum(sizes)} "
                f"elements; the gradient that goes with them has {gradient.numel()}"
            )
        for piece, part in zip(pieces, gradient.split(sizes), strict=True):
            self.got[piece.name] = part.clone().view(piece.shape)
        self.dtypes.add(str(gradient.dtype))

    def _sent(self, gradient: Tensor) -> Tensor:
        return (gradient / GRAIN).round() * GRAIN


class Exact(Coarse):
    """Sends all."""

    def _sent(self, gradient: Tensor) -> Tensor:
        return gradient.clone()


class Blind(Coarse):
    """Sends 0 for a NaN, as a compressor does that happens to leave this entry out."""

    def _sent(self, gradient: Tensor) -> Tensor:
        return super()._sent(gradient.nan_to_num(0.0))


class Alternating(Coarse):
    """Sends nothing in every second call of a parameter: it has a state."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.calls: dict[str, int] = {}

    def __call__(self, gradient: Tensor, pieces: Sequence[Piece]) -> Reduced:
        for piece in pieces:
            self.calls[piece.name] = self.calls.get(piece.name, 0) + 1
        is_sent = [self.calls[piece.name] % 2 == 1 for piece in pieces]
        parts = gradient.split([piece.shape.numel() for piece in pieces])
        kept = [part * sent for part, sent in zip(parts, is_sent, strict=True)]
        self._note(gradient, pieces)
        sent = super()._sent(torch.cat(kept))
        mean = sent.clone()
        dist.all_reduce(mean, group=self.group)
        return Reduced(mean / dist.get_world_size(self.group), sent)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": dict(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.calls = dict(state["calls"])


REDUCES: dict[str, type[Coarse]] = {
    "coarse": Coarse,
    "exact": Exact,
    "blind": Blind,
    "alternating": Alternating,
}


# Two kinds of data parallelism


class Parts(nn.Module):
    """Parameters whose gradients are what they are multiplied with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterDict()
        for name, shape in SHAPES.items():
            value = torch.zeros(shape, dtype=dtype)
            if len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            self.parts[name.replace(".", "_")] = nn.Parameter(value)

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        terms = [
            (self.parts[name.replace(".", "_")] * factors[name]).sum().float()
            for name in USED
            if name in factors
        ]
        return torch.stack(terms).sum()

    def gradients(self) -> dict[str, Tensor | None]:
        """By the names of ``SHAPES``."""
        return {name: self.parts[name.replace(".", "_")].grad for name in SHAPES}


def own_name(name: str) -> str:
    """The name of a parameter in ``named_parameters``."""
    return f"parts.{name.replace('.', '_')}"


class Torchs:
    """Torch's DistributedDataParallel, in small buckets, which change after the first step."""

    def __init__(self, module: Parts, hook: Any, plan: Plan, group: Any) -> None:
        self.module = module
        self.ddp = nn.parallel.DistributedDataParallel(
            module,
            process_group=group,
            bucket_cap_mb=BUCKET_BYTES / 2**20,
            find_unused_parameters=bool(plan.unused),
        )
        self.ddp.register_comm_hook(None, hook)

    def step(self, factors: dict[str, Tensor]) -> None:
        """Compute gradients, and their means."""
        self.module.zero_grad()
        self.ddp(factors).backward()


class Courses:
    """Stands for task 3.12: sums buckets in place, gradients are views of them."""

    def __init__(self, module: Parts, hook: Any, plan: Plan, group: Any) -> None:
        self.module, self.hook, self.group, self.num_steps = module, hook, group, 0

    def step(self, factors: dict[str, Tensor]) -> None:
        """Compute gradients, and their means."""
        self.module.zero_grad()
        self.module(factors).backward()
        parameters = {name: self.module.parts[name.replace(".", "_")] for name in SHAPES}
        flats = _buckets([[parameters[n] for n in names] for names in BUCKETS[self.num_steps > 0]])
        under_way = [self.hook.all_reduce(flat, self.group) for flat in flats]
        for flat, work in zip(flats, under_way, strict=True):
            returned("CompressionHook.all_reduce", work).wait()
            flat /= dist.get_world_size(self.group)
        self.num_steps += 1


def _buckets(parameters: Sequence[Sequence[nn.Parameter]]) -> list[Tensor]:
    """Move gradients into buckets, which lie side by side inside of a longer tensor."""
    sizes = [sum(parameter.numel() for parameter in row) for row in parameters]
    flats = parameters[0][0].new_zeros(sum(sizes) + 5)[3:-2].split(sizes)
    for flat, row in zip(flats, parameters, strict=True):
        _fill(flat, row)
    return [*flats]


def _fill(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        view = part.view(parameter.shape)
        if parameter.grad is not None:
            view.copy_(parameter.grad)
        parameter.grad = view


DOORS: dict[str, Callable[..., Any]] = {TORCHS: Torchs, COURSES: Courses}


# Bodies


def train(lesson: Any, plan: Plan, group: Any = None) -> list[dict[str, Any]]:
    """Train; return step by step what reduce got and what the gradients became.

    At ``plan.restart``, a new module, hook and data parallelism go on from the state of the old.
    """
    made, found = _make(lesson, plan, group), []
    for step in range(plan.steps):
        if step == plan.restart:
            made = _again(lesson, plan, group, made)
        found.append(_step(plan, made, step, group))
    return found


class Made(NamedTuple):
    """All that trains."""

    parallel: Any
    hook: Any
    reduce: Coarse


def _make(lesson: Any, plan: Plan, group: Any) -> Made:
    module, reduce = Parts(getattr(torch, plan.dtype)), REDUCES[plan.reduce](group)
    hook = lesson.CompressionHook(module, reduce)
    return Made(DOORS[plan.door](module, hook, plan, group), hook, reduce)


def _again(lesson: Any, plan: Plan, group: Any, old: Made) -> Made:
    state = returned("CompressionHook.state_dict", old.hook.state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    new = _make(lesson, plan, group)
    new.hook.load_state_dict(torch.load(file, weights_only=False))
    return new


def _step(plan: Plan, made: Made, step: int, group: Any) -> dict[str, Any]:
    rank, dtype = dist.get_rank(group), getattr(torch, plan.dtype)
    drawn = gradients_of(plan, rank, step)
    factors = {n: g.to(dtype) for n, g in drawn.items() if not is_unused(plan, n, rank, step)}
    made.parallel.step(factors)
    gradients = made.parallel.module.gradients()
    return {
        "got": {name: part.tolist() for name, part in made.reduce.got.items()},
        "dtypes": sorted(made.reduce.dtypes),
        "gradients": {n: None if g is None else g.tolist() for n, g in gradients.items()},
    }


def keep_a_state(lesson: Any, plan: Plan) -> list[list[dict[str, Any]]]:
    """Load one state twice, each time for the same steps, while the first hook goes on.

    Returns:
        What came of the steps after the state, without a stop and from the state, twice.
    """
    made = _make(lesson, plan, None)
    _step(plan, made, 0, None)
    state = made.hook.state_dict()
    found = [[_step(plan, made, step, None) for step in range(1, plan.steps)]]
    for _ in range(2):
        other = _make(lesson, plan, None)
        other.hook.load_state_dict(state)
        found.append([_step(plan, other, step, None) for step in range(1, plan.steps)])
    return found


def descend(lesson: Any, door: str, target: float, steps: int) -> float:
    """Minimise ½ (x - target)² of a parameter x that begins at 0; return x."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    hook = lesson.CompressionHook(module, _whole)
    model: Any = module
    if door == TORCHS:
        model = nn.parallel.DistributedDataParallel(module)
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Tensor = 0.5 * (model(torch.ones(1, 1)) - target).square().sum()
        loss.backward()
        if door == COURSES:
            flat = module.weight.grad.view(-1)
            hook.all_reduce(flat).wait()
            flat /= dist.get_world_size()
        optimizer.step()
    return module.weight.item()


def _whole(gradient: Tensor, pieces: Sequence[Piece]) -> Reduced:
    """A plain function: sends whole numbers."""
    sent = gradient.round()
    mean = sent.clone()
    dist.all_reduce(mean)
    return Reduced(mean / dist.get_world_size(), sent)


def foreign_bucket(lesson: Any) -> str:
    """Pass a bucket with elements that belong to no gradient; return the ValueError's text."""
    module = nn.Linear(3, 2)
    hook = lesson.CompressionHook(module, _whole)
    flat = torch.zeros(9)
    module.weight.grad, module.bias.grad = flat[:6].view(2, 3), flat[6:8]
    try:
        hook.all_reduce(flat)
    except ValueError as error:
        return f"ValueError: {error}"
    return ""
