"""Optimizers, the learning rate over the steps, and the mean of the parameters."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distlab.production.config import Config


def optimizer_of(config: Config) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return which optimizer, and what it is made with."""
    common = {"lr": peak_lr(config), "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD, {**common, "momentum": config.momentum}
    return torch.optim.AdamW, common


def peak_lr(config: Config) -> float:
    """Return the learning rate after the warm-up: 0.1 for 256 images is 0.4 for 1,024.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.1.
    """
    return config.lr * config.batch_size / config.lr_batch_size


def share_of_lr(config: Config, steps_per_epoch: int, step: int) -> float:
    """Return which part of ``peak_lr`` the rate is in a step, counted from 0.

    It grows linearly to 1 in ``warmup_epochs``; with ``cosine``, it then falls to 0:
        4 steps of warm-up, 8 in all    0.25  0.5  0.75  1  1  0.85  0.5  0.15
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    rest = max(config.epochs * steps_per_epoch - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / rest))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next step have a rate. It follows from the step alone: there is nothing to save."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class ParameterMean:
    """An exponential moving average of the parameters that a rank holds; it is evaluated instead.

    After k steps each is (1 - d) · Σ d^(k-i) · parameter_i, over its weights: the first steps do
    not pull towards the random start, since the decay in step k is min(d, (1 + k) / (10 + k)).
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self.parameters, self.decay, self.num_updates = list(parameters), decay, 0
        self.means = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take a step's parameters in."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_(self.means, self.parameters, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the means meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(kept)

    @classmethod
    def of(cls, module: nn.Module, decay: float) -> "ParameterMean | None":
        """Return the mean of what this rank holds of a model; with a decay of 0, none."""
        return cls([*module.parameters()], decay) if decay else None

    def state_dict(self) -> dict[str, Any]:
        """Return the means and the number of updates."""
        means = [_local(mean) for mean in self.means]
        return {"means": means, "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.num_updates = state["num_updates"]
        for mean, loaded in zip(self.means, state["means"], strict=True):
            _local(mean).copy_(loaded)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that fully_shard has spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
