"""Datasets that need no download: handwritten digits, and synthetic images of any shape."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.data.splits import DataError, ImageShape, ImageTensors, Splits

_DIGITS_WHITE = 16  # a pixel counts the dark points in a cell of 4 x 4
_DIGITS_MEAN, _DIGITS_STD = (0.3059,), (0.3766,)  # statistics of the training images in [0, 1]
_TEST_PER_CLASS = 36
_SPLIT_SEED = 0


def load_digits() -> Splits:
    """Return scikit-learn's 1,797 bundled digits: 1,437 for training and 360 for testing.

    The test split has 36 images of each of the 10 classes. It never changes, because numpy
    guarantees that `RandomState` always draws the same numbers.

    Raises: DataError: scikit-learn, which contains the file, is not installed.
    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI repository.
    """
    pixels, labels = _read()
    is_test, scale = _test_mask(labels), {"mean": _DIGITS_MEAN, "std": _DIGITS_STD}
    train, test = (
        ImageTensors(pixels[half], labels[half], white=_DIGITS_WHITE, **scale)
        for half in (~is_test, is_test)
    )
    return Splits("digits", train, test, 10, (1, 8, 8), **scale)


@functools.cache  # one copy serves all ranks of a simulated world; ImageTensors never writes to it
def _read() -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(np.loadtxt(_bundled_file(), delimiter=",", dtype=np.uint8))
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].long()


def _bundled_file() -> Path:
    # Find the file without importing sklearn, which takes 1.5 s on every rank of every world.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits come with scikit-learn, which is missing: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _test_mask(labels: Tensor) -> Tensor:
    """Return a mask, (N,) bool, that is True for the test images."""
    random = np.random.RandomState(_SPLIT_SEED)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = np.flatnonzero(labels.numpy() == label)
        mask[random.permutation(members)[:_TEST_PER_CLASS]] = True
    return mask


# Synthetic images, for dry runs and benchmarks, with patterns that models can learn

_WHITE, _MEAN, _STD = 255, 0.5, 0.25


def make_synthetic(
    *,
    image_shape: ImageShape = (3, 32, 32),
    num_classes: int = 10,
    train_size: int = 2048,
    test_size: int = 512,
    seed: int = 0,
) -> Splits:
    """Return noisy copies of one smooth random pattern per class, all determined by the seed.

    Args:
        image_shape: (C, H, W).
        train_size, test_size: Numbers of images.
    Cost: one byte of memory per pixel, channel and image; four times as much while they are drawn.
    """
    random = torch.Generator().manual_seed(seed)
    patterns = _patterns(num_classes, image_shape, random)
    mean, std = (_MEAN,) * image_shape[0], (_STD,) * image_shape[0]
    train, test = (
        ImageTensors(*_draw(size, patterns, random), white=_WHITE, mean=mean, std=std)
        for size in (train_size, test_size)
    )
    return Splits("synthetic", train, test, num_classes, image_shape, mean, std)


def _patterns(num_classes: int, image_shape: ImageShape, random: torch.Generator) -> Tensor:
    """Return (num_classes, C, H, W): a 4 x 4 grid of random colours, interpolated to full size."""
    channels, height, width = image_shape
    grid = torch.randn(num_classes, channels, 4, 4, generator=random)
    return F.interpolate(grid, (height, width), mode="bilinear", align_corners=False)


def _draw(size: int, patterns: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``size`` images as bytes, each half pattern and half noise, and their labels."""
    labels = torch.randint(len(patterns), (size,), generator=random)
    noise = torch.randn(size, *patterns.shape[1:], generator=random)
    images = noise.add_(patterns[labels]).mul_(_STD / 2**0.5).add_(_MEAN)
    return images.mul_(_WHITE).round_().clamp_(0, _WHITE).to(torch.uint8), labels
