"""A small Vision Transformer, torchvision's."""

import math
from typing import cast

from torch import nn

from distlab.data.splits import ImageShape
from distlab.torchvision_repair import import_torchvision

_WIDTH = 64


def build_vit(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a transformer of 4 layers, 4 heads and width 64 over square patches of the image.

        image side     8     28     32     224
        patch side     2      4      4      14
        patches       16     49     64     256

    Args: image_shape: (C, S, S).
    Raises: ValueError: The images are not square.
    Cost: 136,138 parameters for digits.
    Source: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words, section 3.1.
    """
    channels, height, width = image_shape
    if height != width:
        raise ValueError(f"vit needs square images, got {height} x {width}")
    patch = patch_side(height)
    model = import_torchvision().models.VisionTransformer(
        image_size=height,
        patch_size=patch,
        num_layers=4,
        num_heads=4,
        hidden_dim=_WIDTH,
        mlp_dim=2 * _WIDTH,
        num_classes=num_classes,
    )
    # torchvision's first layer only takes 3 channels; this one takes any number.
    model.conv_proj = nn.Conv2d(channels, _WIDTH, kernel_size=patch, stride=patch)
    nn.init.trunc_normal_(model.conv_proj.weight, std=math.sqrt(1 / (channels * patch**2)))
    nn.init.zeros_(model.conv_proj.bias)
    return cast(nn.Module, model)


def patch_side(image_side: int) -> int:
    """Return the largest divisor of ``image_side`` that is no larger than its square root."""
    return max(n for n in range(1, math.isqrt(image_side) + 1) if image_side % n == 0)
