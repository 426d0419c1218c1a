"""Bodies (functions that ranks run) for task 4.13: two kinds of data parallelism with a hook."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned
from phase4.compressors import UNDISTURBED, runs_from_state
from phase4_production.given import Piece, Reduced

SHAPES = {
    "conv.weight": (4, 3, 2, 2),  # in channels_last, so with another order in memory
    "first.weight": (6, 8),
    "first.bias": (6,),
    "scale": (),
    "second.weight": (8, 6),
    "second.bias": (6,),
}
USED = ("first.bias", "scale", "second.weight", "conv.weight", "second.bias", "first.weight")
# Buckets in the first step, and in all later steps.
BUCKETS = (
    (("second.bias", "second.weight"), ("scale", "first.bias", "first.weight"), ("conv.weight",)),
    (("first.weight", "second.bias"), ("conv.weight", "second.weight"), ("scale", "first.bias")),
)
BUCKET_BYTES = 240
NOT_FINITE = math.nan, math.inf, -math.inf
GRAIN, FRACTION = 8.0, 1 / 128  # units of sent values, and of gradients
TORCHS, COURSES = "torch's DistributedDataParallel", "that of task 3.11"


class Plan(NamedTuple):
    """A training run with a hook."""

    door: str  # kind of data parallelism: TORCHS or COURSES
    reduce: str = "coarse"  # kind of compressor, as in ``sent_of``
    steps: int = 6  # number of steps
    dtype: str = "float32"  # dtype of parameters and gradients
    seed: int = 0  # seed of the gradients
    unused: tuple[str, ...] = ()  # parameters without gradients on rank 1 in odd steps
    restart: int = -1  # step before which new objects load the state; -1 for none
    spoiled: int = -1  # step in which each gradient of rank 0 holds a NaN or ±∞; -1 for never


def gradients_of(plan: Plan, rank: int, step: int) -> dict[str, Tensor]:
    """Draw a rank's gradients: multiples of 1/128, exact in bfloat16, although the sums are not."""
    gradients = {}
    for place, (name, shape) in enumerate(SHAPES.items()):
        seed = 1_000_000 * plan.seed + 10_000 * step + 100 * place + rank
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-255, 256, shape, generator=generator) * FRACTION
        gradients[name] = numbers * (not is_unused(plan, name, rank, step))
        if (rank, step) == (0, plan.spoiled):
            gradients[name].view(-1)[0] = NOT_FINITE[place % 3]
    return gradients


def is_unused(plan: Plan, name: str, rank: int, step: int) -> bool:
    """Return whether a rank does not use a parameter in a step."""
    return name in plan.unused and rank == 1 and step % 2 == 1


# Compressors


def sent_of(reduce: str, part: Tensor, call: int) -> Tensor:
    """Return what a compressor of the kind ``reduce`` sends of ``part``.

    It sends ``part`` rounded to multiples of ``GRAIN``, unless it is "exact". A "blind" compressor
    sends 0 for what is not finite, like one that happens to omit this entry. An "alternating"
    compressor sends zeros in every second call.
    """
    if reduce == "exact":
        return part.clone()
    if reduce == "blind":
        part = part.nan_to_num(0.0, 0.0, 0.0)
    return (part / GRAIN).round() * GRAIN * (reduce != "alternating" or call % 2 == 0)


class Compressor:
    """A stateless compressor that records what it gets, and sends part of it."""

    def __init__(self, reduce: str, group: Any) -> None:
        self.reduce, self.group, self.got = reduce, group, dict[str, Tensor]()
        self.dtypes = set[str]()
        self.calls = dict[str, int]()

    def __call__(self, gradient: Tensor, pieces: Sequence[Piece]) -> Reduced:
        sizes = [piece.shape.numel() for piece in pieces]
        if sum(sizes) != gradient.numel():
            raise WrongResult(
                f"the pieces {[(name, (*shape,)) for name, shape in pieces]} have {sum(sizes)} "
                f"elements; the gradient that goes with them has {gradient.numel()}"
            )
        parts = gradient.split(sizes)
        for piece, part in zip(pieces, parts, strict=True):
            self.got[piece.name] = part.clone().view(piece.shape)
        self.dtypes.add(str(gradient.dtype))
        sent = torch.cat([self._sent(p.name, part) for p, part in zip(pieces, parts, strict=True)])
        return mean_of(sent, self.group)

    def _sent(self, name: str, part: Tensor) -> Tensor:
        self.calls[name] = self.calls.get(name, -1) + 1
        return sent_of(self.reduce, part, self.calls[name])


class WithState(Compressor):
    """A compressor whose state is the number of times that each parameter was sent."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": dict(self.calls)}

    def load_state_dict(self, state: Any) -> None:
        self.calls = dict(state["calls"])


def mean_of(sent: Tensor, group: Any = None) -> Reduced:
    """Average the sent values over the ranks."""
    mean = sent.clone()
    dist.all_reduce(mean, group=group)
    return Reduced(mean / dist.get_world_size(group), sent)


# Two kinds of data parallelism


class Parts(nn.Module):
    """A module that multiplies its parameters by factors, which become the gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterDict()
        for name, shape in SHAPES.items():
            value = torch.zeros(shape, dtype=dtype)
            if len(shape) == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            self.parts[name.replace(".", "_")] = nn.Parameter(value)

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        used = [name for name in USED if name in factors]
        return torch.stack([(self.part(n) * factors[n]).sum().float() for n in used]).sum()

    def part(self, name: str) -> nn.Parameter:
        """Return a parameter by its name in ``SHAPES``."""
        parameter: nn.Parameter = self.parts[name.replace(".", "_")]
        return parameter


def own_name(name: str) -> str:
    """Return the name that a parameter from ``SHAPES`` has in ``named_parameters``."""
    return f"parts.{name.replace('.', '_')}"


class Torchs:
    """Torch's DistributedDataParallel with small buckets, which change after the first step."""

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
        """Compute gradients, and average them over the ranks."""
        self.module.zero_grad()
        self.ddp(factors).backward()


class Courses:
    """A short version of task 3.11's data parallelism.

    It sums buckets in place, and the gradients are views of the buckets.
    """

    def __init__(self, module: Parts, hook: Any, plan: Plan, group: Any) -> None:
        self.module, self.hook, self.group, self.num_steps = module, hook, group, 0

    def step(self, factors: dict[str, Tensor]) -> None:
        """Compute gradients, and average them over the ranks."""
        self.module.zero_grad()
        self.module(factors).backward()
        rows = BUCKETS[self.num_steps > 0]
        flats = _buckets([[self.module.part(name) for name in names] for names in rows])
        under_way = [self.hook.all_reduce(flat, self.group) for flat in flats]
        for flat, work in zip(flats, under_way, strict=True):
            returned("CompressionHook.all_reduce", work).wait()
            flat /= dist.get_world_size(self.group)
        self.num_steps += 1


def _buckets(parameters: Sequence[Sequence[nn.Parameter]]) -> list[Tensor]:
    """Move gradients into buckets, which are adjacent parts of a longer tensor."""
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


class Training:
    """A training run of a module with a hook, under one kind of data parallelism."""

    def __init__(self, lesson: Any, plan: Plan, group: Any = None) -> None:
        self.plan, self.group = plan, group
        kind = WithState if plan.reduce == "alternating" else Compressor
        self.module, self.reduce = Parts(getattr(torch, plan.dtype)), kind(plan.reduce, group)
        self.hook = lesson.CompressionHook(self.module, self.reduce)
        self.parallel = DOORS[plan.door](self.module, self.hook, plan, group)

    def steps(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Take steps; return what reduce got in each, and the resulting gradients."""
        return [self._step(step) for step in numbers]

    def _step(self, step: int) -> dict[str, Any]:
        plan, rank, dtype = self.plan, dist.get_rank(self.group), getattr(torch, self.plan.dtype)
        drawn = gradients_of(plan, rank, step)
        factors = {n: g.to(dtype) for n, g in drawn.items() if not is_unused(plan, n, rank, step)}
        self.parallel.step(factors)
        gradients = {name: self.module.part(name).grad for name in SHAPES}
        return {
            "got": {name: part.tolist() for name, part in self.reduce.got.items()},
            "dtypes": sorted(self.reduce.dtypes),
            "gradients": {n: None if g is None else g.tolist() for n, g in gradients.items()},
        }


def train(lesson: Any, plan: Plan, group: Any = None) -> dict[str, list[dict[str, Any]]]:
    """Train as planned; from ``plan.restart`` on, also train new objects that load the state."""
    training, later = Training(lesson, plan, group), range(plan.restart, plan.steps)
    if plan.restart < 0:
        return {UNDISTURBED: training.steps(range(plan.steps))}
    before = training.steps(range(plan.restart))
    runs = runs_from_state(
        *(training, lambda: Training(lesson, plan, group), lambda training: training.hook),
        lambda training: training.steps(later),
    )
    return runs | {UNDISTURBED: before + runs[UNDISTURBED]}


def foreign_bucket(lesson: Any) -> dict[str, str]:
    """Pass a bucket with elements that belong to no gradient; return the refusal."""
    module = nn.Linear(3, 2)
    hook = lesson.CompressionHook(module, lambda gradient, _: mean_of(gradient))
    flat = torch.zeros(9)
    module.weight.grad, module.bias.grad = flat[:6].view(2, 3), flat[6:8]
    return refusal_of(lambda: hook.all_reduce(flat))
