"""The result type of all loaders in distlab.data, and the one error that they raise.

N images, C channels, H x W pixels; white = the pixel value that becomes 1.0 before normalisation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

Sample = TypeVar("Sample", covariant=True)
ImageShape = tuple[int, int, int]  # (C, H, W)


class DataError(RuntimeError):
    """A dataset is not available; the message says what failed and what to do about it."""

    is_secondary = False  # True if raised only because another rank failed


class SizedDataset(Dataset[Sample]):
    """A torch Dataset whose length is known, so that a sampler can shard it."""

    def __len__(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class Splits:
    """The two splits of an image dataset, and the properties that a model needs."""

    name: str
    train: SizedDataset[tuple[Tensor, int]]  # image float32 (C, H, W), label
    test: SizedDataset[tuple[Tensor, int]]
    num_classes: int
    image_shape: ImageShape
    mean: tuple[float, ...]  # per channel: pixel in [0, 1] = image * std + mean
    std: tuple[float, ...]


class ImageTensors(SizedDataset[tuple[Tensor, int]]):
    """Images in memory as bytes, converted to normalised float32 on access.

    Bytes take a quarter of the memory of floats, and every sample is a new tensor: writing to it
    changes no other rank's data, even if all ranks are threads of one process.

    Args:
        pixels: (N, C, H, W) uint8; never written to.
        labels: (N,) int64.
        white: Pixel value that represents 1.0.
        mean, std: One number per channel; image = (pixel / white - mean) / std.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        *,
        white: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.pixels = pixels
        self.labels = labels
        self._black = torch.tensor(mean).view(-1, 1, 1) * white
        self._unit = torch.tensor(std).view(-1, 1, 1) * white

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._normalise(self.pixels[index]), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Return many samples; a DataLoader calls this, so a whole batch is converted in one go."""
        images = self._normalise(self.pixels[indices])
        return list(zip(images, self.labels[indices].tolist(), strict=True))

    def _normalise(self, pixels: Tensor) -> Tensor:
        return (pixels - self._black) / self._unit
