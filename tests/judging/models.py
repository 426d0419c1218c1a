"""Models, batches and hand-written optimizers for the bodies and references of all phases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 5, 4
FLAG = 9.0  # an input whose first feature is this number uses the parameter ``rare``
IGNORED = -100  # a target that does not count
DOUBLE: dict[str, Any] = {"dtype": torch.float64}  # unaffected by autocast, so results are exact


def batch(shape: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs (…, FEATURES) in float64, and a target for each input."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*shape, FEATURES, generator=generator, **DOUBLE)
    return inputs, torch.randint(CLASSES, tuple(shape), generator=generator)


def state_of(module: nn.Module) -> dict[str, list[float]]:
    """Return the parameters' values by name."""
    return {name: p.detach().flatten().tolist() for name, p in module.named_parameters()}


def gradients_of(module: nn.Module) -> dict[str, list[float] | None]:
    """Return the gradients' values by name; None where there is no gradient."""
    return {
        name: None if p.grad is None else p.grad.flatten().tolist()
        for name, p in module.named_parameters()
    }


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient; shared ones are listed only once."""
    return [p for p in module.parameters() if p.requires_grad]


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return the trainable parameters as two optimizer groups; the second may be empty."""
    parameters = trainable(module)
    return [{"params": parameters[::2]}, {"params": parameters[1::2]}]


class Worn(nn.Module):
    """A classifier that has been in use, so its trainable parameters have stale gradients.

    ``tied`` and ``first`` share a weight, and ``frozen`` is not trainable and must not change.
    ``unused`` does not contribute to the logits; ``rare`` does where the inputs have a flag.
    With ``is_transposed``, the weight of ``head`` is not contiguous. The layer that is used last is
    registered first. The model records the number of rows in each forward pass.
    """

    def __init__(self, seed: int = 7, *, is_transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(FEATURES, CLASSES, **DOUBLE)
        if is_transposed:
            self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())
        self.unused = nn.Parameter(torch.randn(4, **DOUBLE))
        self.tied = nn.Linear(FEATURES, FEATURES, **DOUBLE)
        self.rare = nn.Parameter(torch.randn(FEATURES, **DOUBLE))
        self.frozen = nn.Parameter(torch.randn(FEATURES, **DOUBLE), requires_grad=False)
        self.first = nn.Linear(FEATURES, FEATURES, **DOUBLE)
        self.first.weight = self.tied.weight
        for parameter in trainable(self):
            parameter.grad = torch.full_like(parameter, 3.0)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.head(self.hidden(x))  # type: ignore[no-any-return]

    def hidden(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + self.frozen
        flagged = x[..., :1] == FLAG
        if flagged.any():
            hidden = hidden + self.rare * flagged
        return torch.tanh(self.tied(hidden))


class Odd(Worn):
    """``Worn`` without gradients, but with a float32 parameter and buffers of several dtypes.

    The parameter is ``single``. The buffers ``offset`` and ``count`` are persistent; ``scratch`` is
    not.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.zero_grad()
        self.single = nn.Parameter(torch.randn(4))
        self.register_buffer("offset", torch.randn(FEATURES, **DOUBLE))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.hidden(x) + self.get_buffer("offset")
        return self.head(hidden * self.single.double().sum()) * scale  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Layers of a given width, which decides whether activations or parameters take more memory."""

    NUM_LAYERS = 6

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.Tanh()]
        for _ in range(self.NUM_LAYERS - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def deep_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for a ``Deep``."""
    return torch.ones(rows, FEATURES), torch.ones(rows, dtype=torch.int64)


class ByHand:
    """Base class of hand-written optimizers; importing torch's would take a second.

    A parameter without a gradient stays unchanged, and so does its state.
    """

    def __init__(self, module: nn.Module, lr: float, weight_decay: float = 0.0) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        self.parameters = trainable(module)
        self.states = [_State(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero."""
        for parameter in self.parameters:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if parameter.grad is not None:
                state.num_steps += 1
                parameter -= self.lr * self.update(parameter, parameter.grad, state)

    def update(self, parameter: Tensor, gradient: Tensor, state: "_State") -> Tensor:
        """Return what a step with a learning rate of 1 would subtract from a parameter."""
        raise NotImplementedError


@dataclass
class _State:
    """Optimizer state of one parameter."""

    first: Tensor
    second: Tensor
    num_steps: int = 0


class SGD(ByHand):
    """``torch.optim.SGD``.

    velocity = momentum · velocity + gradient + weight_decay · weight
    weight   = weight - lr · velocity
    """

    def __init__(
        self, module: nn.Module, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(module, lr, weight_decay)
        self.momentum = momentum

    def update(self, parameter: Tensor, gradient: Tensor, state: _State) -> Tensor:
        return state.first.mul_(self.momentum).add_(gradient + self.weight_decay * parameter)


class AdamW(ByHand):
    """``torch.optim.AdamW``, in which a weight with a gradient of zero still decays."""

    BETAS = 0.9, 0.999

    def update(self, parameter: Tensor, gradient: Tensor, state: _State) -> Tensor:
        moments = []
        for moment, beta, term in zip(
            (state.first, state.second), self.BETAS, (gradient, gradient.square()), strict=True
        ):
            moment.mul_(beta).add_((1 - beta) * term)
            moments.append(moment / (1 - beta**state.num_steps))
        return moments[0] / (moments[1].sqrt() + 1e-8) + self.weight_decay * parameter
