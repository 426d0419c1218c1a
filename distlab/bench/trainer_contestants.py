"""The production trainer, a few steps at a time, and what all that train beside it share."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab import lessons
from distlab.production.batches import on_device
from distlab.production.config import Config
from distlab.production.images import open_images
from distlab.production.lessons import Lessons
from distlab.production.loading import Keys, loader_of
from distlab.production.models import build_model
from distlab.production.optimization import optimizer_of
from distlab.production.strategies.base import DTYPES
from distlab.production.types import Group

CLASSES = 10  # of synthetic data
Batch = tuple[Tensor, Tensor]  # images (b, 3, S, S) and classes (b,), on the device


class Losses(NamedTuple):
    """The sum of the losses of some images on this rank, and how many they are."""

    total: Tensor | float = 0.0
    num_images: int = 0

    def and_of(self, total: Tensor | float, num_images: int) -> Losses:
        """Add those of other images."""
        return Losses(self.total + total, self.num_images + num_images)


class Setting(NamedTuple):
    """What all contestants have in common."""

    config: Config  # its strategy is that of ours
    lessons: Lessons
    device: torch.device

    def model(self) -> nn.Module:
        """Build the model: the same on all ranks and for all contestants."""
        return build_model(self.config, CLASSES, self.device)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer that the configuration names."""
        kind, options = optimizer_of(self.config)
        return kind(parameters, **options)

    def autocast(self) -> Any:
        """Compute in 16 bits, where the configuration says so."""
        is_whole = self.config.precision == "fp32"
        dtype = DTYPES[self.config.precision]
        return nullcontext() if is_whole else torch.autocast(self.device.type, dtype)


Contestant = Callable[[int], Losses]  # trains for so many steps

# Ours


@contextmanager
def trainer(setting: Setting) -> Iterator[Contestant]:
    """Open a training with all that watches it; what it tells people is made, and not shown."""
    with redirect_stderr(io.StringIO()), ExitStack() as stack:
        training: Any = lessons.imagenet_trainer.Training(*setting)
        few = training.batches = _Few(training.batches, setting)
        for part in (training.telemetry, training.stop):
            stack.enter_context(part)
        plain_step, losses = training.train_step, [Losses()]

        def counted_step(images: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = plain_step(images, targets)
            losses[0] = losses[0].and_of(loss, len(targets))
            return loss

        def run(num_steps: int) -> Losses:
            losses[0], end = Losses(), training.progress.step + num_steps
            while training.progress.step < end:
                few.num_steps = end - training.progress.step
                training.train_epoch()  # or what is left of it
            return losses[0]

        training.train_step = counted_step
        yield run


class _Few:
    """The trainer's batches, but no more than asked for; on a GPU, one that is there already."""

    def __init__(self, batches: Any, setting: Setting) -> None:
        self.batches, self.setting, self.num_steps = batches, setting, 0
        self.bad_images = 0

    def of_epoch(self, strategy: Any) -> Iterator[Batch]:
        """Yield what is wanted of what is left of the epoch."""
        left = self.batches.of_epoch(strategy)
        if self.setting.device.type == "cuda":
            left = [fixed_batch(self.setting, strategy.replicas)] * len(self.batches.sampler)
        return islice(left, self.num_steps)


# What they train on


def batches_of(setting: Setting, group: Group) -> Iterator[Batch]:
    config, lesson, device = setting
    if device.type == "cuda":
        fixed = fixed_batch(setting, group)
        while True:
            yield fixed
    data = open_images(config)
    sampler = lesson("training_state").ResumableSampler(
        len(data.train), config.batch_size, config.seed, group
    )
    loader = loader_of(data.train, Keys(sampler), config, device)
    while True:
        for images, labels in loader:
            yield on_device(images, config, device), labels
        sampler.epoch += 1


def fixed_batch(setting: Setting, group: Group) -> Batch:
    """Return a made-up batch, which a GPU need not wait for."""
    config, _, device = setting
    random = torch.Generator(device).manual_seed(dist.get_rank(group))
    shape = (config.batch_size // dist.get_world_size(group), 3, *2 * [config.image_size])
    images = torch.randn(shape, device=device, generator=random)
    labels = torch.randint(CLASSES, shape[:1], device=device, generator=random)
    return on_device(images, config, device), labels
