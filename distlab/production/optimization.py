"""Optimizers, the learning-rate schedule, and the moving average of the parameters."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distlab.production.config import Config
from distlab.production.states import local


def optimizer_of(config: Config) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer's class and arguments."""
    common = {"lr": peak_lr(config), "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD, {**common, "momentum": config.momentum}
    return torch.optim.AdamW, common


def groups_of(module: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return the optimizer's groups; vectors and scalars decay only if ``decay_norms`` is true."""
    parameters = [*module.parameters()]
    if config.decay_norms:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def peak_lr(config: Config) -> float:
    """Return the learning rate after the warm-up: 0.1 for 256 images gives 0.4 for 1,024.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.1.
    """
    return config.lr * config.batch_size / config.lr_batch_size


def share_of_lr(config: Config, steps_per_epoch: int, step: float) -> float:
    """Return the learning rate of a step, counted from 0, as a share of ``peak_lr``.

    The step may be fractional if a run was resumed with a different batch size.

    The share grows linearly to 1 during ``warmup_epochs``; with ``cosine``, it then falls to 0:
        4 warm-up steps, 8 in all       0.25  0.5  0.75  1  1  0.85  0.5  0.15
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return min((step + 1) / warmup, 1.0)
    if config.schedule == "constant":
        return 1.0
    rest = max(config.epochs * steps_per_epoch - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / rest, 1.0)))


def lr_at(config: Config, sampler: Any) -> float:
    """Return the learning rate for a sampler's next step."""
    steps_per_epoch = -(-sampler.num_samples // sampler.global_batch)
    step = sampler.epoch * steps_per_epoch + sampler.position / sampler.global_batch
    return peak_lr(config) * share_of_lr(config, steps_per_epoch, step)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate for the next step. It depends only on the step, so it is not saved."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class ModelMean:
    """An exponential moving average of this rank's part of a model, for evaluation.

    The decay in step k is min(decay, (1 + k) / (10 + k)), which keeps the random start from
    dominating the first means. BatchNorm's running means are averaged too, because those of the
    newest parameters would not fit the averaged parameters.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Start from the current model; with a decay of 0 there is no mean."""
        self.decay = decay
        floating = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self.parameters = TensorMean([*module.parameters()] if decay else [])
        self.buffers = TensorMean(floating if decay else [])

    def update(self) -> None:
        """Update the means after a step."""
        self.parameters.update(self.decay)
        self.buffers.update(self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the means into the model for the duration of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self.parameters.swap()
        self.buffers.swap()


class TensorMean:
    """The exponential moving averages of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.num_updates = tensors, 0
        self.means = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Move the means towards the tensors."""
        self.num_updates += 1
        if self.means:
            share = 1 - min(decay, (1 + self.num_updates) / (10 + self.num_updates))
            torch._foreach_lerp_(self.means, list(self.tensors), share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the means and the tensors."""
        for tensor, mean in zip(self.tensors, self.means, strict=True):
            kept = tensor.detach().clone()
            tensor.copy_(mean)
            mean.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the means and the number of updates."""
        return {"means": [local(m) for m in self.means], "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the means and the number of updates."""
        self.num_updates = state["num_updates"]
        for mean, loaded in zip(self.means, state["means"], strict=True):
            local(mean).copy_(loaded)
