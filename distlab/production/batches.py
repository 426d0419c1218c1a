"""Batches on the device, without unreadable images, and with mixup or cutmix if configured."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distlab.data.folders import transforms
from distlab.production.config import Config
from distlab.production.images import BAD, ImageData
from distlab.production.loading import Keys, loader_of
from distlab.production.strategies import Strategy

Targets = Tensor  # (b,) classes, or (b, classes) class probabilities


class Batches:
    """This rank's parts of the global batches, in a sampler's order.

    Attributes:
        bad_images: Number of images that this rank could not read in this epoch.
    """

    def __init__(self, data: ImageData, sampler: Any, config: Config, device: torch.device) -> None:
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
        for images, labels in self.loader:
            self.bad_images += int((labels == BAD).sum()) if strategy.counts else 0
            yield self._ready(images, labels)

    def _ready(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Targets]:
        is_good = labels != BAD
        if not bool(is_good.any()):  # every rank must take part, here with a blank image
            blank = torch.zeros(1, *images.shape[1:])
            return on_device(blank, self.config, self.device), self._labels(torch.tensor([BAD]))
        if not bool(is_good.all()):
            images, labels = images[is_good], labels[is_good]
        ready = on_device(images, self.config, self.device), self._labels(labels)
        return self.mixer(*ready) if self.mixer else ready

    def _labels(self, labels: Tensor) -> Tensor:
        return labels.to(self.device, non_blocking=True)


def on_device(images: Tensor, config: Config, device: torch.device) -> Tensor:
    """Move images to the device, in the model's memory layout."""
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return images.to(device, non_blocking=True, memory_format=layout)


def _mixer(config: Config, num_classes: int) -> Any:
    """Return the mixer of image pairs: mixup, cutmix, a random choice of the two, or None."""
    v2 = transforms()
    kinds = [(v2.MixUp, config.mixup), (v2.CutMix, config.cutmix)]
    mixers = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
    return v2.RandomChoice(mixers) if mixers else None
