"""ResNet-18, torchvision's, with the stem for small images."""

from typing import cast

from torch import nn

from distlab.data.splits import ImageShape
from distlab.torchvision_repair import import_torchvision

_SMALL = 64  # largest side of images that the first layers must not shrink


def build_resnet18(image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a ResNet-18; images up to 64 x 64 enter through one 3 x 3 convolution.

    The stem of the paper, 7 x 7 with stride 2 and a max-pool, leaves 8 x 8 of a 32 x 32 image
    before the first block; the small stem keeps all 32 x 32.

    It has BatchNorm: a training batch must have at least 2 images (8 x 8 ones end as 1 x 1), and
    N workers with 1/N of the batch each do not compute what one process computes.

    Args: image_shape: (C, H, W).
    Cost: 11,173,962 parameters for CIFAR-10.
    Source: He et al. 2015, Deep Residual Learning, section 4.2 for the small stem.
    """
    channels, height, width = image_shape
    model = cast(nn.Module, import_torchvision().models.resnet18(num_classes=num_classes))
    if max(height, width) <= _SMALL:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
