"""Bodies for tasks 1.9 and 1.10, and the functions that they give to a lesson."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.models import gradients_of as gradients_of_module
from judging.tensors import given_group
from phase1.models import Odd, gradients_of, state_of, tensors_of

# 1.9


def broadcast_odd(lesson: Any, src: int | None, group: Any = None) -> dict[str, Any]:
    """The module after a broadcast, and what has become of its tensors; None leaves src out."""
    module = Odd(dist.get_rank(group) + 1).train(src is None)  # that changes no buffer
    _set_gradients(module, gradients_of(dist.get_rank(group)))
    before, gradients = tensors_of(module), gradients_of_module(module)
    addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
    trainable = [p.requires_grad for p in module.parameters()]
    arguments = [] if src is None else [src]
    lesson.broadcast_parameters(module, *arguments, **given_group(group))
    after = tensors_of(module)
    return {
        "state": state_of(module),
        "replaced": [name for name in before if after.get(name) is not before[name]],
        "moved": [name for name in before if before[name].data_ptr() != addresses[name]],
        "changed": ["requires_grad"] * (trainable != [p.requires_grad for p in module.parameters()])
        + ["gradients"] * (gradients != gradients_of_module(module)),
    }


def _set_gradients(module: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    """Lay gradients out as the parameters are, as autograd does."""
    for name, parameter in module.named_parameters():
        drawn = gradients[name]
        if drawn is not None:
            parameter.grad = torch.empty_like(parameter).copy_(drawn)


# 1.10


class Counted:
    """An all-reduce as any of the lesson's; notes how much it was given, and when."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_bytes: list[int] = []
        self.done_s: list[float] = []

    def __call__(self, x: Tensor, group: Any = None) -> None:
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        self.sizes.append(x.numel())
        self.num_bytes.append(x.nbytes)
        dist.all_reduce(x, group=group)
        self.done_s.append(time.perf_counter())


MIXED = {"conv.weight": torch.float32, "first.weight": torch.bfloat16, "scale": torch.float16}


def average_odd(
    lesson: Any, function: str, mixed: bool = False, group: Any = None
) -> dict[str, Any]:
    """The gradients after averaging, which lie elsewhere, and what the all-reduce was given.

    ``mixed``: parameters of many dtypes.
    """
    module = Odd(0)
    for name, parameter in module.named_parameters() if mixed else ():
        parameter.data = parameter.data.to(MIXED.get(name, torch.float64))
    _set_gradients(module, gradients_of(dist.get_rank(group)))
    before = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    addresses = {name: gradient.data_ptr() for name, gradient in before.items()}
    all_reduce = Counted()
    getattr(lesson, function)(module, all_reduce, group)
    after = dict(module.named_parameters())
    return {
        "means": gradients_of_module(module),
        "moved": [
            name
            for name, gradient in before.items()
            if after[name].grad is not gradient or gradient.data_ptr() != addresses[name]
        ],
        "num_bytes": all_reduce.num_bytes,
    }


def average_by_default(lesson: Any, function: str) -> dict[str, Any]:
    """Only the module is given."""
    module = Odd(0)
    _set_gradients(module, gradients_of(dist.get_rank()))
    getattr(lesson, function)(module)
    return {"means": gradients_of_module(module), "moved": []}


def average_nothing(lesson: Any) -> list[int]:
    """Return the sizes of the all-reduces for a module where nothing is trainable."""
    all_reduce = Counted()
    for function in ("average_gradients", "average_gradients_flat"):
        module = Odd(0).requires_grad_(False)
        getattr(lesson, function)(module, all_reduce)
    return all_reduce.sizes


def average_large(lesson: Any, function: str, size: int) -> list[int]:
    """One layer of ``size`` squared parameters, and an all-reduce that needs no memory.

    Returns how many elements each call of it was given.
    """
    module, sizes = nn.Linear(size, size, bias=False), list[int]()
    module.weight.grad = torch.ones(size, size)
    getattr(lesson, function)(module, lambda x, group=None: sizes.append(x.numel()))
    return sizes


# 1.13


def averaging(given: list[Any]) -> Callable[..., None]:
    """Make an average as any of the lesson's, that notes which all-reduce it is given."""

    def average(module: nn.Module, all_reduce: Any, group: Any = None) -> None:
        given.append(all_reduce)
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)

    return average
