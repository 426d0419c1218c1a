"""Models of task 3.12, their batches, and the all-reduce that it is given."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from judging.models import FLAG, batch


def odd_batch(rows: int, rank: int, step: int) -> Tensor:
    """Return inputs for an ``Odd``; those of even ranks have flags in steps after the first."""
    inputs, _ = batch((rows,), 100 * step + rank)
    if rank % 2 == 0 and step:
        inputs[::2, :1] = FLAG
    return inputs


def loss_of(outputs: Tensor) -> Tensor:
    """Return the sum over the rows."""
    return (outputs - 0.5).square().sum()


class Branches(nn.Module):
    """Weights of 24 bytes each; every rank uses them in its own order."""

    def __init__(self, num_branches: int, dtype: torch.dtype) -> None:
        super().__init__()
        numel = 24 // dtype.itemsize
        self.weights = nn.ParameterList(
            torch.zeros(numel, dtype=dtype) for _ in range(num_branches)
        )

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Add up branches: the gradient of weight i is (i + 1) times x."""
        for index in order:
            x = x + (index + 1) * x.detach()[0] * self.weights[index].sum()
        return x.sum() / len(x)


class _Slowly(torch.autograd.Function):
    """Takes a while in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Layer(NamedTuple):
    """Size of a layer, and the seconds of its backward pass."""

    numel: int
    backward_s: float


class Slow(nn.Module):
    """Layers with known backward times, used in a different order from their registration.

    Before the first one comes something that has no parameters, but a backward pass too.
    """

    def __init__(self, layers: Sequence[Layer], order: Sequence[int], before_s: float) -> None:
        super().__init__()
        self.layers, self.order, self.before_s = layers, order, before_s
        self.weights = nn.ParameterList(torch.zeros(layer.numel) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        x = _Slowly.apply(x, self.before_s)  # type: ignore[no-untyped-call]
        for i in self.order:
            y = x + self.weights[i].sum()
            x = _Slowly.apply(y, self.layers[i].backward_s)  # type: ignore[no-untyped-call]
        return x


class Call(NamedTuple):
    """An all-reduce that was started."""

    num_bytes: int
    address: int
    start_s: float

    def holds(self, gradient: Tensor) -> bool:
        """Return True if a gradient lies in the tensor that was reduced."""
        return gradient.numel() > 0 and 0 <= gradient.data_ptr() - self.address < self.num_bytes


class NotedStart:
    """An all-reduce as the lesson takes it, which notes its calls; its handle can only wait."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, x: Tensor, group: Any = None) -> "_Waitable":
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        self.calls.append(Call(x.nbytes, x.data_ptr(), time.perf_counter()))
        return _Waitable(dist.all_reduce(x, group=group, async_op=True))

    def taken(self) -> list[Call]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class _Waitable:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


def names_in(call: Call, module: nn.Module) -> list[str]:
    """Return the names of the parameters in a reduced tensor, ordered by their addresses."""
    addresses = {
        name: parameter.grad.data_ptr()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and call.holds(parameter.grad)
    }
    return sorted(addresses, key=lambda name: addresses[name])
