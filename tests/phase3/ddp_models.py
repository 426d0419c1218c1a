"""Models of task 3.12, their batches, and the all-reduce that it is given."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES, CLASSES = 5, 3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Odd(nn.Module):
    """A model with all that is unusual; what forward uses last was registered first.

    ``tied`` and ``first`` share a weight, ``frozen`` is not trainable, ``unused`` has no part in
    the result, ``rare`` has one only for inputs with a flag, and ``single`` has another dtype.
    """

    FLAG = 9.0  # in the first feature of a batch

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(FEATURES, CLASSES, **DOUBLE)
        self.single = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(7, **DOUBLE))
        self.tied = nn.Linear(FEATURES, FEATURES, **DOUBLE)
        self.rare = nn.Parameter(torch.randn(FEATURES, **DOUBLE))
        self.frozen = nn.Parameter(torch.randn(FEATURES, **DOUBLE), requires_grad=False)
        self.first = nn.Linear(FEATURES, FEATURES, **DOUBLE)
        self.first.weight = self.tied.weight
        self.register_buffer("offset", torch.randn(FEATURES, **DOUBLE))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = torch.tanh(self.first(x)) + self.frozen + self.get_buffer("offset")
        flagged = x[:, :1] == self.FLAG
        if flagged.any():
            hidden = hidden + self.rare * flagged
        hidden = torch.tanh(self.tied(hidden)) * self.single.double().sum()
        return self.head(hidden) * scale  # type: ignore[no-any-return]


def odd_batch(rows: int, rank: int, step: int) -> Tensor:
    """Inputs of a rank; even ranks have a flag in steps after the first."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(rows, FEATURES, generator=generator, **DOUBLE)
    if rank % 2 == 0 and step:
        inputs[:1, :1] = Odd.FLAG
    return inputs


def loss_of(outputs: Tensor) -> Tensor:
    """The sum over the rows."""
    return (outputs - 0.5).square().sum()


class ByHand:
    """What torch's SGD and AdamW do: the first optimizer of torch takes a second to load.

    A parameter without a gradient stays as it is; with one of zero, its weight decays.
    """

    LR, DECAY, MOMENTUM, BETAS = 0.02, 0.1, 0.9, (0.9, 0.999)

    def __init__(self, kind: str, model: nn.Module) -> None:
        self._update = self._adam if kind == "Adam" else self._sgd
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._state = [[torch.zeros_like(p), torch.zeros_like(p)] for p in self._params]
        self._num_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them zero."""
        for parameter in self._params:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self._num_steps += 1
        for parameter, state in zip(self._params, self._state, strict=True):
            if parameter.grad is not None:
                parameter *= 1 - self.LR * self.DECAY
                parameter -= self.LR * self._update(parameter.grad, *state)

    def _sgd(self, gradient: Tensor, velocity: Tensor, _: Tensor) -> Tensor:
        return velocity.mul_(self.MOMENTUM).add_(gradient)

    def _adam(self, gradient: Tensor, first: Tensor, second: Tensor) -> Tensor:
        corrected = []
        for moment, beta, term in zip(
            (first, second), self.BETAS, (gradient, gradient**2), strict=True
        ):
            moment.mul_(beta).add_((1 - beta) * term)
            corrected.append(moment / (1 - beta**self._num_steps))
        return corrected[0] / (corrected[1].sqrt() + 1e-8)


class Branches(nn.Module):
    """Weights of one size, which the ranks use in different orders."""

    def __init__(self, num_branches: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(6) for _ in range(num_branches))

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
    """Size of a layer, and how long its backward pass takes."""

    numel: int
    backward_s: float


class Slow(nn.Module):
    """Layers whose backward passes take known times, used in another order than registered.

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
    """That an all-reduce was started."""

    num_bytes: int
    dtype: str
    address: int
    start_s: float
    has_group: bool

    def holds(self, gradient: Tensor | None) -> bool:
        """Whether a gradient lies in what was reduced."""
        if gradient is None or not gradient.numel():
            return False
        return 0 <= gradient.data_ptr() - self.address < self.num_bytes


class NotedStart:
    """An all-reduce as the lesson takes it, that notes its calls; what it returns only waits."""

    def __init__(self, group: Any = None) -> None:
        self.group, self.calls = group, list[Call]()

    def __call__(self, x: Tensor, group: Any = None) -> "_Waitable":
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        dtype = str(x.dtype).removeprefix("torch.")
        now_s, has_group = time.perf_counter(), group is self.group
        self.calls.append(Call(x.nbytes, dtype, x.data_ptr(), now_s, has_group))
        return _Waitable(dist.all_reduce(x, group=group, async_op=True))

    def taken(self) -> list[Call]:
        """The calls since this was last asked."""
        calls, self.calls = self.calls, []
        return calls


class _Waitable:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


def names_in(call: Call, module: nn.Module) -> list[str]:
    """The parameters whose gradients lie in what was reduced, in their order there."""
    found = {
        name: parameter.grad.data_ptr()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and call.holds(parameter.grad)
    }
    return sorted(found, key=lambda name: found[name])
