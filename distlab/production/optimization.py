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


def groups_of(module: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return the optimizer's groups: vectors and scalars, as of norms, perhaps without decay."""
    parameters = [*module.parameters()]
    if config.decay_norms:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def peak_lr(config: Config) -> float:
    """Return the learning rate after the warm-up: 0.1 for 256 images is 0.4 for 1,024.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.1.
    """
    return config.lr * config.batch_size / config.lr_batch_size


def share_of_lr(config: Config, steps_per_epoch: int, step: float) -> float:
    """Return which part of ``peak_lr`` the rate is in a step, counted from 0.

    A step may lie between two, in a run that has gone on with another batch size.

    It grows linearly to 1 in ``warmup_epochs``; with ``cosine``, it then falls to 0:
        4 steps of warm-up, 8 in all    0.25  0.5  0.75  1  1  0.85  0.5  0.15
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return min((step + 1) / warmup, 1.0)
    if config.schedule == "constant":
        return 1.0
    rest = max(config.epochs * steps_per_epoch - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / rest, 1.0)))


def lr_at(config: Config, sampler: Any) -> float:
    """Return the rate of the next step of a sampler."""
    steps_per_epoch = -(-sampler.num_samples // sampler.global_batch)
    step = sampler.epoch * steps_per_epoch + sampler.position / sampler.global_batch
    return peak_lr(config) * share_of_lr(config, steps_per_epoch, step)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next step have a rate. It follows from the step alone: there is nothing to save."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class ModelMean:
    """An exponential moving average of what a rank holds of a model; it is evaluated instead.

    The decay in step k is min(decay, (1 + k) / (10 + k)), so that the first steps do not pull
    towards the random start. Running means of BatchNorm are averaged, too: those of the newest
    parameters do not fit to older ones.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Begin with the model as it is; with a decay of 0 there is no mean."""
        self.decay = decay
        floating = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self.parameters = TensorMean([*module.parameters()] if decay else [])
        self.buffers = TensorMean(floating if decay else [])

    def update(self) -> None:
        """Take a step in."""
        self.parameters.update(self.decay)
        self.buffers.update(self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the means meanwhile."""
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
        """Exchange the values of means and tensors."""
        for tensor, mean in zip(self.tensors, self.means, strict=True):
            kept = tensor.detach().clone()
            tensor.copy_(mean)
            mean.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the means and the number of updates."""
        return {"means": [_local(m) for m in self.means], "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.num_updates = state["num_updates"]
        for mean, loaded in zip(self.means, state["means"], strict=True):
            _local(mean).copy_(loaded)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that fully_shard has spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
