"""Bodies (functions that ranks run) for tasks 4.9 to 4.13, which average compressed gradients."""

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from distlab.util.text import counted
from judging.calls import case_told, pair, returned, typed
from judging.tensors import given_group, own_device
from phase4_production.given import Reduced

# The multiples of a grain cannot be represented in a dtype with fewer bits.
GRAINS = {"float32": 1 + 2**-12, "float64": 1 + 2**-40, "bfloat16": 1}


class Case(NamedTuple):
    """A gradient: its length, its dtype, and the kind and seed of its numbers."""

    n: int  # number of entries
    dtype: str = "float32"  # dtype by name
    # "normal": random numbers; "zeros"; "equal": all plus or minus 1; "strided": every second of
    # twice as many random numbers; "nan": small numbers with one larger entry, which is NaN on the
    # last rank; "uneven": random numbers below 1, except for 3r entries of rank r, which are plus
    # or minus 1 or 2.
    kind: str = "normal"
    seed: int = 0  # seed of the random numbers

    def __str__(self) -> str:
        kind = "" if self.kind == "normal" else f" ({self.kind})"
        return f"{counted(self.n, 'entry', 'entries')}, {self.dtype}{kind}"


class How(NamedTuple):
    """A reducing function and its argument: a fraction, a least magnitude or a codec."""

    name: str
    argument: Any


def gradient_of(case: Case, rank: int, num_ranks: int) -> Tensor:
    """Make a rank's gradient."""
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
    """A lossless codec: the codes are the bytes of the halved numbers, and the scale is 2."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and the scale."""
        return (x.float() / 2).contiguous().view(torch.uint8), torch.tensor(2.0)

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the numbers that the codes stand for."""
        return payload[: 4 * n].clone().view(torch.float32) * scale


def reducer(lesson: Any, how: How, group: Any = None) -> Any:
    """Return a function that passes a gradient to the learner's function."""
    options = given_group(group)
    if how.name == "random_k":
        generator = torch.Generator().manual_seed(7)
        return lambda x: lesson.random_k(x, how.argument, generator, **options)
    if how.name == "quantized":
        codec = Exact() if how.argument == "Exact" else getattr(lesson, how.argument)()
        return lambda x: lesson.quantized(x, codec, **options)
    return lambda x: getattr(lesson, how.name)(x, how.argument, **options)


def parts_of(name: str, reduced: Any) -> tuple[Tensor, Tensor]:
    """Return the mean and the sent values from what the learner's function returned.

    Raises:
        WrongResult: The learner's function did not return a Reduced of two tensors.
    """
    parts = getattr(returned(name, reduced), "mean", None), getattr(reduced, "sent", None)
    if not all(isinstance(part, Tensor) for part in parts):
        raise WrongResult(
            f"{name} should return a Reduced (given.py), with the tensors mean and sent; it "
            f"returned a {type(reduced).__name__}, {reduced!r:.60}"
        )
    return parts  # type: ignore[return-value]


def reduce_one(name: str, gradient: Tensor, reduce: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Reduce a gradient; return mean and sent, with dtypes and shapes, and whether it changed."""
    before, memory = gradient.clone(), gradient.detach()
    mean, sent = parts_of(name, reduce(gradient))
    return {
        "mean": mean.double().flatten().tolist(),
        "sent": sent.double().flatten().tolist(),
        "kinds": [[str(part.dtype)[6:], [*part.shape]] for part in (mean, sent)],
        "changed": not torch.equal(memory.nan_to_num(99.0), before.nan_to_num(99.0)),
    }


def reduce_all(
    lesson: Any, how: How, cases: Sequence[Case], group: Any = None
) -> list[dict[str, Any]]:
    """Reduce a gradient of each case; return the results of ``reduce_one``."""
    torch.manual_seed(dist.get_rank(group))  # make the global generators differ between ranks
    reduce = reducer(lesson, how, group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    results: list[dict[str, Any]] = []
    for case in cases:
        if results:
            _meet(group)
        with case_told(f"of {case}"):
            gradient = gradient_of(case, rank, num_ranks).to(own_device(group))
            results.append(reduce_one(how.name, gradient, reduce))
    return results


def _meet(group: Any) -> None:
    """Wait for the other ranks, so that no collective of this case meets one of the next.

    A rank that has left out a collective then waits here, as it would after a single case. Messages
    do it, because a barrier would be reported as the answer's own.
    """
    token, others = torch.zeros(1, device=own_device(group)), range(1, dist.get_world_size(group))
    if dist.get_rank(group) > 0:
        dist.send(token, group=group, group_dst=0)
        dist.recv(token, group=group, group_src=0)
        return
    for other in others:
        dist.recv(token, group=group, group_src=other)
    for other in others:
        dist.send(token, group=group, group_dst=other)


def reduce_long(lesson: Any, how: How, n: int, place: int) -> list[list[int]]:
    """Reduce a long gradient, nonzero only at ``place``; return where mean and sent are nonzero."""
    gradient = torch.zeros(n, dtype=torch.bfloat16)
    gradient[place] = 4.0
    parts = parts_of(how.name, reducer(lesson, how)(gradient))
    return [part.nonzero().flatten().tolist() for part in parts]


def draw_often(lesson: Any, n: int, fraction: float, calls: int) -> dict[str, Any]:
    """Call random_k repeatedly; return each call's indices, and the generator's state."""
    torch.manual_seed(dist.get_rank())
    generator = torch.Generator().manual_seed(99)
    before = generator.get_state()
    all_sent = [
        parts_of("random_k", lesson.random_k(torch.ones(n), fraction, generator))[1]
        for _ in range(calls)
    ]
    state = generator.get_state()
    return {
        "places": [sent.nonzero().flatten().tolist() for sent in all_sent],
        "is drawn from": not torch.equal(before, state),
        "state": state.double().sum().item(),
    }


def feed(lesson: Any, n: int, dtype: str, num_steps: int) -> list[dict[str, Any]]:
    """Call reduce_with_feedback on one rank, with a reduce that returns random numbers.

    The residual is part of a longer tensor, and not contiguous.
    """
    generator = torch.Generator().manual_seed(n)
    residual = torch.zeros(2 * n, dtype=getattr(torch, dtype))[::2]
    memory = residual.detach()
    steps = []
    for _ in range(num_steps):
        gradient, sent, mean = (
            (torch.randint(-40, 40, (n,), generator=generator) * GRAINS[dtype]).to(residual.dtype)
            for _ in range(3)
        )
        step = {"gradient": gradient.tolist(), "sent": sent.tolist(), "mean": mean.tolist()}
        step |= {"before": memory.tolist(), "calls": []}

        def reduce(x: Tensor, step: Any = step, mean: Any = mean, sent: Any = sent) -> Any:
            step["calls"].append(x.tolist())
            return Reduced(mean, sent)

        function = "reduce_with_feedback"
        result = typed(function, lesson.reduce_with_feedback(gradient, residual, reduce), Tensor)
        step |= {"returned": result.tolist(), "after": memory.tolist()}
        steps.append({**step, "changed": gradient.tolist() != step["gradient"]})
    return steps


UNDISTURBED = "without a stop"
T = TypeVar("T")
Result = TypeVar("Result")


def runs_from_state(
    first: T, make: Callable[[], T], owner_of: Callable[[T], Any], run: Callable[[T], Result]
) -> dict[str, Result]:
    """Continue ``first`` without a stop, and start three new runs from its current state.

    Args:
        first: A training run that has already built up state.
        make: Makes a new training run.
        owner_of: Returns the learner's object that holds a run's state.
        run: Trains to the end and returns the results.
    """
    state = returned("state_dict", owner_of(first).state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    runs = {UNDISTURBED: run(first)}
    file.seek(0)
    states = {
        "from a file": torch.load(file, weights_only=False),
        "from the state, while the first run had gone on": state,
        "from the same state once more": state,
    }
    for how, saved in states.items():
        training = make()
        owner_of(training).load_state_dict(saved)
        runs[how] = run(training)
    return runs


def code(lesson: Any, name: str, rows: Sequence[list[float]], dtype: str) -> list[dict[str, Any]]:
    """Encode and decode rows of numbers; decode them again with extra bytes after the codes."""
    return [_code(getattr(lesson, name)(), name, row, dtype) for row in rows]


def _code(codec: Any, name: str, row: list[float], dtype: str) -> dict[str, Any]:
    x = torch.tensor(row, dtype=getattr(torch, dtype))
    before = x.clone()
    with case_told(f"of {len(row)} numbers, {dtype}"):
        payload, scale = pair(f"{name}.encode", codec.encode(x), "the codes and the scale")
        payload, scale = (typed(f"{name}.encode", part, Tensor) for part in (payload, scale))
        longer = torch.cat([payload, torch.tensor([255, 0, 129], dtype=payload.dtype)])
        decoded, again = (
            typed(f"{name}.decode", codec.decode(codes, scale, len(row)), Tensor)
            for codes in (payload, longer)
        )
    parts = {"codes": payload, "scale": scale, "decoded numbers": decoded}
    return {
        "kinds": {what: [str(part.dtype)[6:], [*part.shape]] for what, part in parts.items()},
        "scale": float(scale.sum()),
        "decoded": decoded.tolist(),
        "longer": again.tolist(),
        "changed": not torch.equal(x.nan_to_num(99.0), before.nan_to_num(99.0)),
    }
