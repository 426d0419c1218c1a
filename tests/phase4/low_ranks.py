"""Bodies (functions that ranks run) for task 4.12, which sends products of thin matrices."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from judging.calls import case_told
from judging.tensors import given_group
from phase4.compressors import reduce_one, runs_from_state
from phase4_production.given import Piece

Shapes = dict[str, tuple[int, ...]]  # name of the parameter -> shape
MIXED: Shapes = {
    "conv.weight": (8, 3, 3, 3),
    "conv.bias": (8,),
    "norm.scale": (),
    "wide.weight": (10, 14),
    "empty.weight": (0, 4),
    "head.weight": (4, 4),  # two factors of rank 2 would be no smaller
    "tall.weight": (30, 6),
}
MATRIX = 12, 10
NOT_WORTH_IT: Shapes = {"bias": (5,), "head.weight": (4, 4), "flat.weight": (2, 40)}
NEVER = -9


class Plan(NamedTuple):
    """Gradients to average, step by step."""

    shapes: Shapes  # shapes of the gradients, by name
    rank: int = 2  # rank of PowerSGD
    steps: int = 3  # number of steps
    dtype: str = "float32"  # dtype of the gradients
    low_rank: int = 0  # matrix rank of each mean gradient; 0 for full rank
    zero_step: int = NEVER  # step in which all gradients are zero


def gradients_of(plan: Plan, rank: int, step: int, n: int) -> dict[str, Tensor]:
    """Draw a rank's gradients in a step, by name."""
    seed, gradients = 10_000 * step, {}
    for place, (name, shape) in enumerate(plan.shapes.items()):
        seed += 100 * place
        own = _normal(shape, seed + rank)
        if plan.low_rank and len(shape) > 1 and 0 not in shape:
            noise = own - _normal(shape, seed + (rank + 1) % n)  # sums to zero over the ranks
            own = _low(shape, plan.low_rank, seed + 50) + noise
        gradients[name] = own.to(getattr(torch, plan.dtype)) * (step != plan.zero_step)
    return gradients


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def _low(shape: Sequence[int], rank: int, seed: int) -> Tensor:
    columns = torch.Size(shape[1:]).numel()
    factors = _normal((shape[0], rank), seed), _normal((rank, columns), seed + 1)
    return (factors[0] @ factors[1]).reshape(tuple(shape))


def falling(shape: tuple[int, int], factor: float, seed: int = 1) -> Tensor:
    """Return a matrix whose singular values decrease by a constant factor."""
    least = min(shape)
    left = torch.linalg.qr(_normal((shape[0], least), seed)).Q
    right = torch.linalg.qr(_normal((shape[1], least), seed + 1)).Q
    return (left * factor ** torch.arange(least)) @ right.T


def average(lesson: Any, plan: Plan, group: Any = None) -> list[dict[str, Any]]:
    """Average gradients for some steps; return the results, step by step."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    power_sgd = lesson.PowerSGD(plan.rank, **given_group(group))
    return [_average(power_sgd, gradients_of(plan, rank, step, n)) for step in range(plan.steps)]


def _average(power_sgd: Any, gradients: dict[str, Tensor]) -> dict[str, Any]:
    """Average gradients, joined into one flat tensor."""
    pieces = [Piece(name, gradient.shape) for name, gradient in gradients.items()]
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    with case_told(f"with pieces of the shapes {[(*p.shape,) for p in pieces]}", "PowerSGD"):
        return reduce_one("PowerSGD.__call__", flat, lambda x: power_sgd(x, pieces))


def _mean_of(power_sgd: Any, gradients: dict[str, Tensor]) -> list[float]:
    mean: list[float] = _average(power_sgd, gradients)["mean"]
    return mean


ROWS = ["a", "b"], ["b", "a"], ["b"], ["a"]  # names of the parameters to average, by step


def repeat_matrices(lesson: Any, factor: float, steps: int) -> dict[str, list[float]]:
    """Average two matrices repeatedly, together and separately; return the errors of the means."""
    power_sgd = lesson.PowerSGD(2)
    matrices = {name: falling(MATRIX, factor, seed) for name, seed in (("a", 1), ("b", 5))}
    errors: dict[str, list[float]] = {name: [] for name in matrices}
    for step in range(steps):
        names = ROWS[step % len(ROWS)]
        mean = torch.tensor(_mean_of(power_sgd, {name: matrices[name] for name in names}))
        for name, part in zip(names, mean.split(MATRIX[0] * MATRIX[1]), strict=True):
            errors[name].append(math.dist(part.tolist(), matrices[name].flatten().tolist()))
    return errors


ROWS_OF_ZEROS = 4  # more than there are columns of Q
BEFORE = {  # what comes before the matrix, and the rows of that which are not zero, step by step
    "a gradient of zeros": [[]],
    "the same matrix, then a gradient of zeros": [range(MATRIX[0]), []],
    "a gradient with one row that is not zero": [[ROWS_OF_ZEROS]],
}


def turn_again(lesson: Any, steps: int) -> dict[str, float]:
    """Average a matrix of rank 2, after gradients that leave zeros in Q.

    Returns:
        The relative error of the last mean, by what came before.
    """
    matrix = _low(MATRIX, 2, 11)
    matrix[:ROWS_OF_ZEROS] = 0
    errors = {}
    for what, kept_rows in BEFORE.items():
        power_sgd = lesson.PowerSGD(2)
        for rows in kept_rows:
            before = torch.zeros_like(matrix)
            before[[*rows]] = matrix[[*rows]]
            _mean_of(power_sgd, {"a": before.float()})
        means = [_mean_of(power_sgd, {"a": matrix.float()}) for _ in range(steps)]
        error = math.dist(means[-1], matrix.flatten().tolist())
        errors[what] = error / float(matrix.norm())
    return errors


def spoil_a_step(lesson: Any, plan: Plan, spoiled: int) -> dict[str, Any]:
    """Average with and without an extra step, in which each matrix on rank 0 has a NaN.

    Returns:
        The means of all steps, with and without the extra one.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    steps = [gradients_of(plan, rank, step, n) for step in range(plan.steps)]
    nans = {name: _with_a_nan(part, rank) for name, part in steps[spoiled].items()}
    means = {}
    for how, before in (("without", []), ("with", [nans])):
        power_sgd = lesson.PowerSGD(plan.rank)
        row = [*steps[:spoiled], *before, *steps[spoiled:]]
        means[how] = [_mean_of(power_sgd, gradients) for gradients in row]
    return means


def _with_a_nan(gradient: Tensor, rank: int) -> Tensor:
    spoiled = gradient.clone()
    if rank == 0 and spoiled.dim() > 1 and spoiled.numel():
        spoiled.view(-1)[0] = math.nan
    return spoiled


def begin(lesson: Any) -> dict[str, Any]:
    """Take a first step with each of several seeds and names.

    Returns:
        The means, and whether torch's global generator is left alone.
    """
    matrix = falling(MATRIX, 0.9)
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    used = lesson.PowerSGD(2)
    _mean_of(used, {"a": matrix})
    used.load_state_dict(lesson.PowerSGD(2).state_dict())
    runs = {
        "by default": (lesson.PowerSGD(2), "a"),
        "a second time": (lesson.PowerSGD(2), "a"),
        "with the seed 0": (lesson.PowerSGD(2, seed=0), "a"),
        "with the state of a new PowerSGD loaded": (used, "a"),
        "with the seed 7": (lesson.PowerSGD(2, seed=7), "a"),
        "with another name": (lesson.PowerSGD(2), "b"),
    }
    means = {how: _mean_of(power_sgd, {name: matrix}) for how, (power_sgd, name) in runs.items()}
    return {"means": means, "is left alone": torch.equal(torch.get_rng_state(), before)}


def begin_elsewhere(lesson: Any) -> list[list[float]]:
    """Take a first step here, and one as in a process in which texts have another hash."""
    gradients = {"a": falling(MATRIX, 0.9)}
    here = _mean_of(lesson.PowerSGD(2), gradients)
    lesson.hash = lambda value: hash(value) ^ (5 * _holds_a_text(value))  # hides the built-in one
    return [here, _mean_of(lesson.PowerSGD(2), gradients)]


def _holds_a_text(value: Any) -> bool:
    return (
        any(map(_holds_a_text, value)) if isinstance(value, tuple) else type(value) in (str, bytes)
    )


def go_on(lesson: Any, plan: Plan, saved_after: int) -> dict[str, list[Any]]:
    """Average for some steps without a stop, and from the state after ``saved_after`` steps.

    Returns:
        The results of the steps after that state, by kind of run.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    steps = [gradients_of(plan, rank, step, n) for step in range(plan.steps)]
    first = lesson.PowerSGD(plan.rank)
    for gradients in steps[:saved_after]:
        _average(first, gradients)
    return runs_from_state(
        *(first, lambda: lesson.PowerSGD(plan.rank), lambda power_sgd: power_sgd),
        lambda power_sgd: [_average(power_sgd, gradients) for gradients in steps[saved_after:]],
    )


COLUMNS = {
    "of random numbers": lambda: _normal((7, 3), 1),
    "of one column": lambda: _normal((5, 1), 2),
    "as wide as high": lambda: _normal((4, 4), 3),
    "of very small numbers": lambda: 1e-12 * _normal((7, 3), 4),
    "whose columns are almost equal": lambda: _normal((9, 1), 5) + 1e-4 * _normal((9, 3), 6),
    "whose columns are equal": lambda: _normal((6, 1), 7).repeat(1, 3),
    "of rank 2 with four columns": lambda: _low((8, 4), 2, 8),
    "with a column of zeros in the middle": lambda: _normal((6, 3), 9) * torch.tensor([1, 0, 1]),
    "of zeros": lambda: torch.zeros(5, 2, dtype=torch.float64),
    "of one column of zeros": lambda: torch.zeros(5, 1, dtype=torch.float64),
    "whose last column is of zeros": lambda: _normal((6, 3), 9) * torch.tensor([1, 1, 0]),
    "that is not contiguous": lambda: _normal((3, 14), 10).T[::2],
}


def orthogonalize(lesson: Any, dtype: str) -> dict[str, dict[str, float]]:
    """Make the columns of each matrix orthonormal.

    Returns:
        For each matrix, how far the new columns are from orthonormal, and how much of the old
        columns lies outside their span.
    """
    return {
        what: _errors(lesson, draw().to(getattr(torch, dtype))) for what, draw in COLUMNS.items()
    }


def _errors(lesson: Any, matrix: Tensor) -> dict[str, float]:
    before, memory = matrix.double().clone(), matrix.detach()
    lesson.orthogonalize(matrix)
    q = memory.double()
    lost = before - q @ (q.T @ before)
    return {
        "not orthonormal": float((q.T @ q - torch.eye(q.shape[1])).abs().max()),
        "lost": float(lost.abs().max() / before.abs().max().clamp(min=1e-300)),
    }
