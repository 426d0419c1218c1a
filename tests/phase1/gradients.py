"""Bodies for tasks 1.9 to 1.11, and the functions that they give to a lesson."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase1.calls import error_of, returned
from phase1.models import Odd, batch_of, classifier, gradients_of, state_of, tensors_of

# 1.9


def broadcast_odd(lesson: Any, src: int, group: Any = None) -> dict[str, Any]:
    """The module after a broadcast, and which of its tensors are others, or lie elsewhere."""
    module = Odd(dist.get_rank(group) + 1)
    before = tensors_of(module)
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    lesson.broadcast_parameters(module, src, group)
    after = tensors_of(module)
    return {
        "state": state_of(module),
        "replaced": [name for name in before if after.get(name) is not before[name]],
        "moved": [name for name in before if before[name].data_ptr() != addresses[name]],
        "trainable": [p.requires_grad for p in module.parameters()],
    }


# 1.10


class Counted:
    """An all-reduce as any of the lesson's; notes how many elements it was given, and when."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.done_s: list[float] = []

    def __call__(self, x: Tensor, group: Any = None) -> None:
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        self.sizes.append(x.numel())
        dist.all_reduce(x, group=group)
        self.done_s.append(time.perf_counter())


def average_odd(lesson: Any, function: str, group: Any = None) -> dict[str, Any]:
    """The gradients after averaging, which lie elsewhere, and what the all-reduce was given."""
    module = Odd(0)
    _set_gradients(module, gradients_of(dist.get_rank(group)))
    before = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    addresses = {name: gradient.data_ptr() for name, gradient in before.items()}
    all_reduce = Counted()
    getattr(lesson, function)(module, all_reduce, group)
    after = {name: p.grad for name, p in module.named_parameters()}
    return {
        "means": {n: None if g is None else g.flatten().tolist() for n, g in after.items()},
        "moved": [
            name
            for name, gradient in before.items()
            if after[name] is not gradient or gradient.data_ptr() != addresses[name]
        ],
        "calls": all_reduce.sizes,
    }


def _set_gradients(module: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    """Lay gradients out as the parameters are, as autograd does."""
    for name, parameter in module.named_parameters():
        drawn = gradients[name]
        if drawn is not None:
            parameter.grad = torch.empty_like(parameter).copy_(drawn)


# 1.11


def train_steps(
    lesson: Any, sizes: list[int], num_steps: int, length: int = 0, group: Any = None
) -> dict[str, Any]:
    """Losses and final weights, with momentum; weights start equal."""
    rank, model = dist.get_rank(group), classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, changed = [], set()
    for step in range(num_steps):
        batch = batch_of(sizes, rank, step, length)
        loss = lesson.train_step(model, optimizer, batch, group=group)
        losses.append(float(returned("train_step", loss)))
        untouched = batch_of(sizes, rank, step, length)
        pairs = zip(("inputs", "targets"), batch, untouched, strict=True)
        changed |= {name for name, now, then in pairs if not torch.equal(now, then)}
    return {"losses": losses, "state": state_of(model), "changed": sorted(changed)}


def averaging(given: list[Any]) -> Callable[..., None]:
    """Make an average as any of the lesson's, that notes which all-reduce it is given."""

    def average(module: nn.Module, all_reduce: Any, group: Any = None) -> None:
        given.append(all_reduce)
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)

    return average


def step_with_arguments(lesson: Any) -> dict[str, Any]:
    """Which of the functions given were used, and how often."""
    all_reduce, given = Counted(), list[Any]()
    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = batch_of([3] * dist.get_world_size(), dist.get_rank(), 0)
    lesson.train_step(model, optimizer, batch, all_reduce=all_reduce, average=averaging(given))
    return {"all_reduce": len(all_reduce.sizes), "average": [one is all_reduce for one in given]}


def step_without_data(lesson: Any) -> str:
    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    empty = batch_of([0] * dist.get_world_size(), dist.get_rank(), 0)
    return error_of(lambda: lesson.train_step(model, optimizer, empty))
