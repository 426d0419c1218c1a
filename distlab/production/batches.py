"""Batches on the device, without unreadable images, and with mixup or cutmix if configured."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.data.folders import transforms
from distlab.production.config import Config
from distlab.production.datasets import Data
from distlab.production.images import normalised
from distlab.production.jpegs import check_decoder, decoded
from distlab.production.loading import Keys, loader_of
from distlab.production.samples import BAD, blank, dtype_of
from distlab.production.strategies import Strategy

Targets = Tensor  # (b,) classes, (b, classes) class probabilities, or (b, T) tokens


class Batches:
    """This rank's parts of the global batches, in a sampler's order.

    Attributes:
        bad_images: Number of images that this rank could not read in this epoch.
    """

    def __init__(self, data: Data, sampler: Any, config: Config, device: torch.device) -> None:
        if config.decode == "torchvision":
            check_decoder(device)
        self.config, self.device, self.data = config, device, data
        self.loader = loader_of(data.train, Keys(sampler), config, device, stays=True)
        self.sampler, self.bad_images = sampler, 0
        self.mixer = _mixer(config, data.num_classes)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *error: object) -> None:
        """End the loader's processes; if the garbage collector did it, each one would take 5 s."""
        if self.loader._iterator is not None:
            self.loader._iterator._shutdown_workers()  # type: ignore[attr-defined]

    def of_epoch(self, strategy: Strategy) -> Iterator[tuple[Tensor, Targets]]:
        """Yield the epoch's remaining batches; a rank that computes nothing gets empty ones."""
        self.bad_images = 0
        if not strategy.computes:
            yield from [(torch.zeros(0), torch.zeros(0))] * len(self.sampler)
            return
        for inputs, targets in decoded(self.loader, self.device):
            self.bad_images += int((targets == BAD).sum()) if strategy.counts else 0
            yield self._ready(inputs, targets)

    def _ready(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Targets]:
        is_good, is_mixed = targets != BAD, self.mixer is not None
        if not bool(is_good.any()):  # every rank must take part, here with a blank sample
            inputs, targets = blank(self.config, 1, inputs.shape[-1])
            is_mixed = False
        elif not bool(is_good.all()):
            inputs, targets = inputs[is_good], targets[is_good]
        targets = targets.to(self.device, non_blocking=True)
        ready = on_device(inputs, self.config, self.device), targets
        return self.mixer(*ready) if is_mixed else ready


def on_device(inputs: Tensor, config: Config, device: torch.device) -> Tensor:
    """Move inputs to the device, and make images numbers in the model's layout and dtype."""
    moved = inputs.to(device, non_blocking=True)
    if config.is_language:
        return moved
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    is_bytes = moved.dtype == torch.uint8  # blank images are numbers
    numbers = normalised(moved, dtype_of(config)) if is_bytes else moved
    return numbers.to(memory_format=layout)


def _mixer(config: Config, num_classes: int) -> Any:
    """Return the mixer of image pairs: mixup, cutmix, a random choice of the two, or None."""
    v2 = transforms()
    kinds = [(v2.MixUp, config.mixup), (v2.CutMix, config.cutmix)]
    mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(mixers) if mixers else None
