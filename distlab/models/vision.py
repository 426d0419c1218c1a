"""Image models: a small CNN, torchvision's ResNet-18 and a small Vision Transformer."""

import math
from typing import Any, cast

import torch
from torch import nn

from distlab.data.splits import ImageShape
from distlab.torchvision_repair import import_torchvision

SMALL = 64  # images with sides up to this long keep their size in a ResNet's stem
VIT_WIDTH, VIT_HEADS = 64, 4


def build_cnn(image_shape: ImageShape, num_classes: int) -> nn.Sequential:
    """Return three convolutions and a linear layer, as one `nn.Sequential`.

        8 x 8 digits:   (1, 8, 8) -> (32, 8, 8) -> (64, 8, 8) -> (64, 4, 4) -> (64, 4, 4) -> 10

    It has no BatchNorm and no dropout: images are processed independently, so N workers with 1/N of
    the batch each compute the same gradient as one process.

    On digits, SGD with momentum 0.9, lr 0.05 and batch 64 gets 98.4 % of the test images right
    after 8 epochs (5 seeds: 98.1 to 98.6), in 2 s on one thread of an AMD EPYC.

    Args: image_shape: (C, H, W), H and W at least 4.
    Raises: ValueError: The images are smaller than 4 x 4.
    Cost: 65,994 parameters for digits, 87,114 for MNIST, 66,570 for CIFAR-10.
    """
    channels, height, width = image_shape
    side = min(height, width)
    if side < 4:
        raise ValueError(f"cnn needs images of at least 4 x 4, got {height} x {width}")
    stride = 1 if side < 16 else 2  # a 32 x 32 image then costs as much as 4 digits, rather than 16
    trunk = nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3, stride=stride, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(max(1, side // (8 * stride))),  # leaves about 4 x 4 for any image
        nn.Flatten(),
    )
    features = trunk(torch.zeros(1, *image_shape)).shape[1]
    return trunk.append(nn.Linear(features, num_classes))


def build_resnet18(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a ResNet-18; images up to 64 x 64 enter through one 3 x 3 convolution.

    It has BatchNorm: a training batch needs at least 2 images (8 x 8 ones shrink to 1 x 1), and
    N workers with 1/N of the batch each do not get the same gradient as one process.

    Args: image_shape: (C, H, W).
    Cost: 11,173,962 parameters for CIFAR-10.
    """
    channels, height, width = image_shape
    resnet = import_torchvision().models.resnet18(num_classes=num_classes)
    if max(height, width) <= SMALL:
        return with_small_stem(resnet, channels)
    # With 3 channels, torchvision's own layer could stay, but then seeds would give other weights.
    return _with_stem(resnet, nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False))


def with_small_stem(resnet: Any, channels: int) -> nn.Module:
    """Replace the first layers of a ResNet for images up to 64 x 64.

    The paper's stem, 7 x 7 with stride 2 and a max-pool, shrinks a 32 x 32 image to 8 x 8 before
    the first block; the small stem keeps it at 32 x 32.

    Source: He et al. 2015, Deep Residual Learning, section 4.2 for the small stem.
    """
    resnet.maxpool = nn.Identity()
    return _with_stem(resnet, nn.Conv2d(channels, 64, 3, padding=1, bias=False))


def _with_stem(resnet: Any, stem: nn.Conv2d) -> nn.Module:
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    resnet.conv1 = stem
    return cast(nn.Module, resnet)


def build_vit(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a transformer with 4 layers, 4 heads and width 64 over square image patches.

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
        num_heads=VIT_HEADS,
        hidden_dim=VIT_WIDTH,
        mlp_dim=2 * VIT_WIDTH,
        num_classes=num_classes,
    )
    # torchvision's first layer only takes 3 channels; this one takes any number.
    model.conv_proj = nn.Conv2d(channels, VIT_WIDTH, kernel_size=patch, stride=patch)
    nn.init.trunc_normal_(model.conv_proj.weight, std=math.sqrt(1 / (channels * patch**2)))
    nn.init.zeros_(model.conv_proj.bias)
    return cast(nn.Module, model)


def patch_side(image_side: int) -> int:
    """Return the largest divisor of ``image_side`` that is no larger than its square root."""
    return max(n for n in range(1, math.isqrt(image_side) + 1) if image_side % n == 0)
