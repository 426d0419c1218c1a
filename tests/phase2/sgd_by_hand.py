"""SGD for the references of tasks 2.2 to 2.5: torch's first optimizer takes a second to load."""

import torch
from torch import Tensor, nn


class SGD:
    """What ``torch.optim.SGD`` does with the trainable parameters of a model.

        velocity = momentum · velocity + gradient + weight_decay · weight
        weight   = weight − lr · velocity

    A parameter without a gradient keeps its weight and its velocity.
    """

    def __init__(
        self, model: nn.Module, lr: float, momentum: float, weight_decay: float = 0.0
    ) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._velocities: dict[int, Tensor] = {}  # by number of the parameter

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                decayed = parameter.grad + self.weight_decay * parameter
                before = self._velocities.get(number, torch.zeros_like(decayed))
                self._velocities[number] = self.momentum * before + decayed
                parameter -= self.lr * self._velocities[number]
