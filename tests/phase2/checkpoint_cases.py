"""Functions that task 2.6 checkpoints, in float64, with their gradients and numbers of calls."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from distlab.grade import WrongResult
from judging.calls import cause_told, returned

TWICE = "backward through the graph a second time"
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
Checkpoint = Callable[..., Any]
Found = dict[str, Any]


class Counted(nn.Module):
    """A module that counts its calls."""

    def __init__(self, inner: nn.Module, calls: Counter[str]) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls[name_of(self.inner)] += 1
        return self.inner(*args, **kwargs)


def counted(fn: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    """Return ``fn`` with its calls counted; a module stays a module."""
    if isinstance(fn, nn.Module):
        return Counted(fn, calls)

    @wraps(fn)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[name_of(fn)] += 1
        return fn(*args, **kwargs)

    return counting


def name_of(fn: Callable[..., Any]) -> str:
    return type(fn).__name__ if isinstance(fn, nn.Module) else fn.__name__


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, **DOUBLE).requires_grad_()


def linear(num_in: int = 4, num_out: int = 4) -> nn.Linear:
    return nn.Linear(num_in, num_out, **DOUBLE)


def finished(loss: Tensor, **leaves: Tensor | nn.Module) -> Found:
    """Go backward from ``loss``; return it, and the gradients: without one, of zeros."""
    loss.backward()  # type: ignore[no-untyped-call]
    tensors: dict[str, Tensor] = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors |= {f"{name}.{key}": p for key, p in value.named_parameters()}
    gradients = {
        name: [0.0] * x.numel() if x.grad is None else x.grad.flatten().tolist()
        for name, x in tensors.items()
    }
    return {"loss": loss.item(), "gradients": gradients}


def a_module(checkpoint: Checkpoint) -> Found:
    x, before, after = leaf(3, 4), linear(), linear()
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    y = after(checkpoint(block, before(x)))
    return finished((y * y).sum(), x=x, before=before, block=block, after=after)


def a_module_in_training(checkpoint: Checkpoint) -> Found:
    x, block = leaf(3, 4), nn.Sequential(linear(), nn.Dropout(0.4), nn.Tanh())
    y = checkpoint(block, x.sin())
    return finished((y * y).sum(), x=x, block=block)


def keyword_arguments(checkpoint: Checkpoint) -> Found:
    x, y, layer = leaf(3, 4), leaf(3, 4), linear()
    other = y.sin()

    def fn(x: Tensor, power: int, *, other: Tensor, scale: float, kind: str, mask: Any) -> Tensor:
        assert (kind, mask) == ("tanh", None)
        return getattr(torch, kind)(layer(x) ** power) * other * scale

    result = checkpoint(fn, x, 2, other=other, scale=0.5, kind="tanh", mask=None)
    return finished((result**2 + other).sum(), x=x, other=y, layer=layer)


def nested_arguments(checkpoint: Checkpoint) -> Found:
    x, y, z, before = leaf(3, 4), leaf(3, 4), leaf(3, 4), linear()
    mask = torch.arange(12).view(3, 4) % 3 > 0

    def fn(pair: list[Tensor], options: dict[str, Any], rows: tuple[Tensor, int]) -> Tensor:
        a, b = pair
        mixed = torch.where(options["mask"], a * b, options["third"].exp())
        return mixed[rows[0]] * rows[1]

    third = before(z).sin()
    options = {"mask": mask, "third": third}
    result = checkpoint(fn, [x.cos(), y], options, (torch.tensor([2, 0, 2]), 3))
    return finished((result**2 + third).sum(), x=x, y=y, third=z, before=before)


def several_results(checkpoint: Checkpoint) -> Found:
    x, layer, unused = leaf(3, 4), linear(), linear()

    def fn(x: Tensor) -> tuple[Any, ...]:
        h = layer(x).tanh()
        return h * 2, unused(h), h.argmax(dim=1), "words", h.exp()

    found = checkpoint(fn, x.sin())
    if not isinstance(found, tuple) or len(found) != 5 or found[3] != "words":
        raise WrongResult(f"fn returned a tuple of five; checkpoint returned {found!r:.60}")
    doubled, _, index, _, grown = found
    picked = doubled.gather(1, index[:, None])
    return finished((picked**2).sum() + grown.sum(), x=x, layer=layer, unused=unused)


def a_tuple_of_one(checkpoint: Checkpoint) -> Found:
    x, layer = leaf(3, 4), linear()
    found = checkpoint(lambda x: (layer(x).tanh(),), x.sin())
    if not isinstance(found, tuple) or len(found) != 1:
        raise WrongResult(f"fn returned a tuple of one; checkpoint returned {found!r:.60}")
    return finished((found[0] ** 2).sum(), x=x, layer=layer)


def only_parameters(checkpoint: Checkpoint) -> Found:
    embedding, layer = nn.Embedding(7, 4, **DOUBLE), linear()
    ids = torch.tensor([[0, 3, 3], [6, 1, 0]])
    of_module = checkpoint(nn.Sequential(embedding, nn.Tanh()), ids)
    of_function = checkpoint(lambda x: layer(x).sin(), torch.ones(2, 4, **DOUBLE))
    loss = (of_module**2).sum() + (of_function**2).sum()
    with cause_told({"does not require grad": PARAMETERS_ONLY}):
        return finished(loss, embedding=embedding, layer=layer)


def only_the_argument(checkpoint: Checkpoint) -> Found:
    x, frozen = leaf(3, 4), nn.Sequential(linear(), nn.Tanh()).requires_grad_(False)
    y = checkpoint(frozen, x.sin())
    return finished((y**2).sum(), x=x, frozen=frozen)


def only_a_keyword_argument(checkpoint: Checkpoint) -> Found:
    x, frozen = leaf(3, 4), nn.Bilinear(4, 4, 4, **DOUBLE).requires_grad_(False)
    y = checkpoint(frozen, torch.randn(3, 4, **DOUBLE), input2=x.sin())
    return finished((y**2).sum(), x=x, frozen=frozen)


def some_need_none(checkpoint: Checkpoint) -> Found:
    x, fixed, layer, frozen = leaf(3, 4), torch.randn(3, 4, **DOUBLE), linear(), linear()
    frozen.requires_grad_(False)
    ids = torch.tensor([2, 0, 1])

    def fn(x: Tensor, fixed: Tensor, ids: Tensor) -> Tensor:
        return layer(frozen(x).tanh() * fixed)[ids]

    result = checkpoint(fn, x.sin(), fixed, ids)
    return finished((result**2).sum(), x=x, fixed=fixed, layer=layer, frozen=frozen)


def used_twice(checkpoint: Checkpoint) -> Found:
    x, layer = leaf(3, 4), linear()
    h = x.sin()
    product = checkpoint(lambda a, b: layer(a) * b.exp(), h, h)
    y = checkpoint(layer, product) + layer(h)
    return finished((y**2).sum(), x=x, layer=layer)


def argument_returned(checkpoint: Checkpoint) -> Found:
    x, layer = leaf(3, 4), linear()
    same, grown = checkpoint(lambda x: (x, layer(x).exp()), x.sin())
    return finished((same * grown).sum(), x=x, layer=layer)


def checkpoint_in_checkpoint(checkpoint: Checkpoint) -> Found:
    x = leaf(3, 4)
    layers = nn.Sequential(linear(), linear(), linear())

    def inner(x: Tensor) -> Tensor:
        return dropout(layers[1](x).tanh(), 0.4)

    def outer(x: Tensor) -> Tensor:
        return layers[2](checkpoint(inner, dropout(layers[0](x), 0.4))).tanh()

    y = checkpoint(outer, x.sin())
    return finished((y**2).sum(), x=x, layers=layers)


CASES: dict[str, tuple[Callable[[Checkpoint], Found], ...]] = {
    "arguments": (a_module, a_module_in_training, keyword_arguments, nested_arguments),
    "results": (several_results, a_tuple_of_one, argument_returned, used_twice),
    "parameters": (only_parameters, some_need_none, checkpoint_in_checkpoint),
    "frozen modules": (only_the_argument, only_a_keyword_argument),
}


def run_cases(lesson: Any, about: str, seed: int) -> dict[str, Found]:
    """Loss, gradients and numbers of calls of the cases about something, by name.

    Raises:
        WrongResult: results were lost.
        RuntimeError: with its cause, where the graph of the outside was walked through twice.
    """
    with cause_told({TWICE: OUTSIDE}):
        return {case.__name__: _run_case(lesson, case, seed) for case in CASES[about]}


def _run_case(lesson: Any, case: Callable[[Checkpoint], Found], seed: int) -> Found:
    torch.manual_seed(seed)  # what one case does to the generator is not blamed on the next
    calls: Counter[str] = Counter()

    def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return given_back(lesson.checkpoint(counted(fn, calls), *args, **kwargs))

    return {**case(checkpoint), "calls": dict(calls)}


PARAMETERS_ONLY = (
    "No argument of fn requires a gradient here, only its parameters do. The result must require "
    "one all the same: autograd records a Function only if one of its inputs requires a gradient"
)
OUTSIDE = (
    "the backward pass went through the graph outside of the checkpointed function, and then came "
    "there again. Call the function a second time with detached tensors, so that the inner "
    "backward pass ends at them, and return their gradients"
)


def given_back(value: Any) -> Any:
    return returned("checkpoint", value)
