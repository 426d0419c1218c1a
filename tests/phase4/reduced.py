"""Bodies for tasks 4.9 to 4.11: gradients that are reduced in compressed form."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from distlab.util.text import counted
from judging.calls import case_told, pair, returned
from judging.tensors import given_group
from phase4_production.given import Reduced

GRAINS = {"float32": 1 + 2**-12, "float64": 1 + 2**-40, "bfloat16": 1}  # exact here, not in less


class Case(NamedTuple):
    """A gradient: of which length, dtype and kind.

    Attributes:
        kind: "normal": random numbers. "zeros". "equal": plus or minus 1. "strided": every second
            of twice as many random numbers. "nan": the last rank has one among small numbers.
            "uneven": random numbers below 1, and on rank r, in 3r places, plus or minus 1 or 2.
    """

    n: int
    dtype: str = "float32"
    kind: str = "normal"
    seed: int = 0

    def __str__(self) -> str:
        kind = "" if self.kind == "normal" else f" ({self.kind})"
        return f"{counted(self.n, 'entry', 'entries')}, {self.dtype}{kind}"


class How(NamedTuple):
    """Which function reduces, and its argument: a fraction, a least magnitude or a codec."""

    name: str
    argument: Any


def gradient_of(case: Case, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's gradient."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    x = torch.randn(2 * case.n, generator=generator, dtype=torch.float64)
    if case.kind == "uneven":
        x = x.sign() * (x.abs() % 0.9 + 0.05)
        count = min(3 * rank, case.n)
        places = torch.randperm(case.n, generator=generator)[:count]
        x[places] = (1.0 + torch.arange(count) % 2) * x[places].sign()
    if case.kind == "equal":
        x = x.sign()
    if case.kind == "zeros":
        x = torch.zeros_like(x)
    if case.kind == "nan":
        x = x / 100
        x[case.n // 2] = torch.nan if rank == num_ranks - 1 else 0.5
    x = x.to(getattr(torch, case.dtype))
    return x[::2] if case.kind == "strided" else x[: case.n].clone()


class Exact:
    """A codec that loses nothing: the bytes of each number. Its scale is 2, to be halved."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes, and the scale."""
        return (x.float() / 2).contiguous().view(torch.uint8), torch.tensor(2.0)

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers."""
        return payload[: 4 * n].clone().view(torch.float32) * scale


def reducer(lesson: Any, how: How, group: Any = None) -> Any:
    """Return what reduces a gradient with the learner's function."""
    options = given_group(group)
    if how.name == "random_k":
        generator = torch.Generator().manual_seed(7)
        return lambda x: lesson.random_k(x, how.argument, generator, **options)
    if how.name == "quantized":
        codec = Exact() if how.argument == "Exact" else getattr(lesson, how.argument)()
        return lambda x: lesson.quantized(x, codec, **options)
    return lambda x: getattr(lesson, how.name)(x, how.argument, **options)


def _parts(name: str, value: Any) -> tuple[Tensor, Tensor]:
    """Return the mean and what was sent.

    Raises:
        WrongResult: it is something else.
    """
    parts = getattr(returned(name, value), "mean", None), getattr(value, "sent", None)
    if not all(isinstance(part, Tensor) for part in parts):
        raise WrongResult(
            f"{name} should return a Reduced, with the tensors mean and sent; it returned a "
            f"{type(value).__name__}, {value!r:.60}"
        )
    return parts  # type: ignore[return-value]


def reduce_all(
    lesson: Any, how: How, cases: Sequence[Case], group: Any = None
) -> list[dict[str, Any]]:
    """Reduce a gradient of each case.

    Returns:
        The mean and what was sent, with dtype and shape, and whether the gradient has changed.
    """
    torch.manual_seed(dist.get_rank(group))  # other numbers on each rank, for who draws from these
    reduce = reducer(lesson, how, group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    return [_reduced(reduce, how.name, case, gradient_of(case, rank, num_ranks)) for case in cases]


def _reduced(reduce: Any, name: str, case: Case, gradient: Tensor) -> dict[str, Any]:
    given, before = gradient.detach(), gradient.clone()
    with case_told(f"of {case}"):
        mean, sent = _parts(name, reduce(gradient))
    return {
        "mean": mean.double().flatten().tolist(),
        "sent": sent.double().flatten().tolist(),
        "kinds": [(str(part.dtype)[6:], tuple(part.shape)) for part in (mean, sent)],
        "changed": not torch.equal(given.nan_to_num(99.0), before.nan_to_num(99.0)),
    }


def draw_often(lesson: Any, n: int, fraction: float, calls: int) -> dict[str, Any]:
    """Call random_k again and again; return each time's places, and the states of generators."""
    torch.manual_seed(dist.get_rank())
    generator = torch.Generator().manual_seed(99)
    before = generator.get_state()
    found = [
        _parts("random_k", lesson.random_k(torch.ones(n), fraction, generator))[1]
        for _ in range(calls)
    ]
    state = generator.get_state()
    return {
        "places": [one.nonzero().flatten().tolist() for one in found],
        "is_drawn_from": not torch.equal(before, state),
        "state": state.double().sum().item(),
    }


def targets(n: int, rank: int, num_ranks: int) -> Tensor:
    """Return where a rank's loss is least: far from the others' in the first two places."""
    far = 6.0 * (2 * rank - (num_ranks - 1))
    target = torch.linspace(1.0, 2.0, n)
    target[::3] *= -1
    target[0], target[1] = far, 1 - far
    return target


def train(lesson: Any, how: How, n: int, num_steps: int, feedback: str) -> list[float]:
    """Minimize the mean over all ranks of ½|x - target|²; return x.

    Args:
        feedback: "lesson": the learner's reduce_with_feedback. "own": the tests'. "": none, which
            shows that it is needed.
    """
    reduce = reducer(lesson, how)
    target = targets(n, dist.get_rank(), dist.get_world_size())
    x, residual = torch.zeros(n), torch.zeros(n)
    for step in range(num_steps):
        gradient = x - target
        if feedback == "lesson":
            mean = returned(
                "reduce_with_feedback", lesson.reduce_with_feedback(gradient, residual, reduce)
            )
        else:
            mean, sent = _parts(how.name, reduce(gradient + residual))
            residual += gradient - sent if feedback else 0.0
        x = x - 0.2 / (1 + 0.02 * step) * mean
    return x.tolist()


class Step(NamedTuple):
    """What went into a step with feedback and what came out, in a world of one rank."""

    gradient: list[float]
    before: list[float]  # the residual
    wanted: list[list[float]]  # with which reduce was called
    sent: list[float]
    mean: list[float]
    returned: list[float]
    after: list[float]  # the residual
    changed: bool  # gradient


def feed(lesson: Any, n: int, dtype: str, num_steps: int) -> list[dict[str, Any]]:
    """Call reduce_with_feedback with a reduce whose results could be anything."""
    generator = torch.Generator().manual_seed(n)
    residual = torch.zeros(n, dtype=getattr(torch, dtype))
    seen = residual.detach()
    steps = []
    for _ in range(num_steps):
        gradient, sent, mean = (
            (torch.randint(-40, 40, (n,), generator=generator) * GRAINS[dtype]).to(residual.dtype)
            for _ in range(3)
        )
        copies = [one.clone() for one in (gradient, sent, mean)]
        before, calls = seen.tolist(), []

        def reduce(x: Tensor, calls: Any = calls, mean: Any = mean, sent: Any = sent) -> Any:
            calls.append(x.tolist())
            return Reduced(mean, sent)

        found = returned(
            "reduce_with_feedback", lesson.reduce_with_feedback(*(gradient, residual, reduce))
        )
        if not isinstance(found, Tensor):
            raise WrongResult(
                "reduce_with_feedback should return the mean, a tensor; it returned a "
                f"{type(found).__name__}, {found!r:.60}"
            )
        step = Step(
            *(copies[0].tolist(), before, calls, copies[1].tolist(), copies[2].tolist()),
            *(found.tolist(), seen.tolist(), not torch.equal(gradient, copies[0])),
        )
        steps.append(step._asdict())
    return steps


def code(lesson: Any, name: str, x: list[float], dtype: str) -> dict[str, Any]:
    """Encode and decode; the payload that is decoded has more bytes behind it."""
    codec = getattr(lesson, name)()
    tensor = torch.tensor(x, dtype=getattr(torch, dtype))
    before = tensor.clone()
    with case_told(f"of {len(x)} numbers, {dtype}"):
        payload, scale = pair(f"{name}.encode", codec.encode(tensor), "the codes and the scale")
        for what, part in (("the codes", payload), ("the scale", scale)):
            if not isinstance(part, Tensor):
                raise WrongResult(f"{name}.encode: {what} should be a tensor, not {part!r:.50}")
        longer = torch.cat([payload, torch.tensor([255, 0, 129], dtype=payload.dtype)])
        numbers = [codec.decode(one, scale, len(x)) for one in (payload, longer)]
    for one in numbers:
        if not isinstance(one, Tensor):
            raise WrongResult(f"{name}.decode should return a tensor; it returned {one!r:.60}")
    return {
        "payload": (str(payload.dtype)[6:], tuple(payload.shape)),
        "scale_kind": (str(scale.dtype)[6:], tuple(scale.shape)),
        "scale": float(scale.sum()),
        "decoded_kind": (str(numbers[0].dtype)[6:], tuple(numbers[0].shape)),
        "decoded": numbers[0].tolist(),
        "longer": numbers[1].tolist(),
        "changed": not torch.equal(tensor.nan_to_num(99.0), before.nan_to_num(99.0)),
    }
