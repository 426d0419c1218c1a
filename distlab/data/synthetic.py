"""Made-up images of any shape, for dry runs and speed: no files, and still learnable."""

import torch
import torch.nn.functional as F
from torch import Tensor

from distlab.data.splits import ImageShape, ImageTensors, Splits

_WHITE = 255
_MEAN, _STD = 0.5, 0.25


def make_synthetic(
    *,
    image_shape: ImageShape = (3, 32, 32),
    num_classes: int = 10,
    train_size: int = 2048,
    test_size: int = 512,
    seed: int = 0,
) -> Splits:
    """Return noisy copies of one smooth random pattern per class; the seed decides all of them.

    Args:
        image_shape: (C, H, W).
        train_size, test_size: Numbers of images.
    Cost: train_size + test_size bytes of memory per pixel; four times as much while drawing.
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
    """Return (num_classes, C, H, W): a 4 x 4 grid of random colours, blurred up to full size."""
    channels, height, width = image_shape
    grid = torch.randn(num_classes, channels, 4, 4, generator=random)
    return F.interpolate(grid, (height, width), mode="bilinear", align_corners=False)


def _draw(size: int, patterns: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``size`` images as bytes and their labels, pattern and noise in equal parts."""
    labels = torch.randint(len(patterns), (size,), generator=random)
    noise = torch.randn(size, *patterns.shape[1:], generator=random)
    images = noise.add_(patterns[labels]).mul_(_STD / 2**0.5).add_(_MEAN)
    return images.mul_(_WHITE).round_().clamp_(0, _WHITE).to(torch.uint8), labels
