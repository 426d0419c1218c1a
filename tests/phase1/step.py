"""Bodies for task 1.11, and the functions that they give to a lesson."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from judging.calls import refusal_of, returned
from phase1.gradients import Counted
from phase1.models import FEATURES, Saturated, Stepped, batch_of, state_of


def train_steps(
    lesson: Any, sizes: list[int], num_steps: int, length: int = 0, group: Any = None
) -> dict[str, Any]:
    """Losses, final weights and rows seen; weights start equal, with gradients from before."""
    rank, model = dist.get_rank(group), Stepped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, changed, is_kept = [], set[str](), True
    for step in range(num_steps):
        batch = batch_of(sizes, rank, step, length)
        model.register_buffer("kept", torch.full((2,), float(rank)))
        losses.append(returned("train_step", _step(lesson, model, optimizer, batch, group)))
        changed |= {"inputs"} if batch[0].requires_grad else set()
        is_kept = is_kept and model.kept.tolist() == [rank] * 2
        del model.kept
        untouched = batch_of(sizes, rank, step, length)
        pairs = zip(("inputs", "targets"), batch, untouched, strict=True)
        changed |= {name for name, now, then in pairs if not torch.equal(now, then)}
    return {
        "losses": [float(loss) for loss in losses],
        "types": sorted({type(loss).__name__ for loss in losses if not isinstance(loss, float)}),
        "state": state_of(model),
        "rows": model.rows,
        "changed": sorted(changed),
        "are_buffers_kept": is_kept,
    }


def _step(lesson: Any, model: nn.Module, optimizer: Any, batch: Any, group: Any) -> Any:
    """Leave the group out where there is none."""
    given = {} if group is None else {"group": group}
    return lesson.train_step(model, optimizer, batch, **given)


def step_with_arguments(lesson: Any, gradient: float, group: Any = None) -> dict[str, Any]:
    """What the functions given were called with, and by how much the weights moved.

    The average given makes every gradient ``gradient``, which decides the step.
    """
    model, all_reduce, given = Stepped(), Counted(), list[list[bool]]()
    average = _deciding(gradient, lambda *got: given.append(_same(got, (model, all_reduce, group))))
    before = state_of(model)
    batch = batch_of([3] * dist.get_world_size(group), dist.get_rank(group), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lesson.train_step(model, optimizer, batch, all_reduce=all_reduce, average=average, group=group)
    after = state_of(model)
    moved = {
        name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after
    }
    return {"average": given, "sizes": all_reduce.sizes, "moved": moved}


def _deciding(gradient: float, note: Callable[..., None]) -> Callable[..., None]:
    """Make an average, with the names of the lesson's, that gives every parameter its gradient."""

    def average(module: nn.Module, all_reduce: Any, group: Any = None) -> None:
        note(module, all_reduce, group)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)

    return average


def _same(got: Sequence[object], expected: Sequence[object]) -> list[bool]:
    return [a is b for a, b in zip(got, expected, strict=True)]


def step_without_data(lesson: Any) -> dict[str, Any]:
    """How the step is refused, and whether the parameters are as before."""
    model = Stepped()
    before = state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    empty = batch_of([0] * dist.get_world_size(), dist.get_rank(), 0)
    refusal = refusal_of(lambda: lesson.train_step(model, optimizer, empty))
    return {**refusal, "changed": state_of(model) != before}


def step_in_bfloat16(lesson: Any, sizes: list[int], num_wrong: list[int]) -> float:
    """The loss where each target that is wrong costs 64, and all others nothing."""
    rank, model = dist.get_rank(), Saturated()
    inputs = torch.full((sizes[rank], FEATURES), -1.0, dtype=torch.bfloat16)
    inputs[: num_wrong[rank]] = 1
    targets = torch.zeros(sizes[rank], dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = lesson.train_step(model, optimizer, (inputs, targets))
    return float(returned("train_step", found))
