"""Small models for every lesson: `build("cnn", image_shape=(1, 8, 8), num_classes=10)`."""

from collections.abc import Callable

from torch import nn

from distlab.data.splits import ImageShape
from distlab.models.gpt import GPT
from distlab.models.vision import build_cnn, build_resnet18, build_vit
from distlab.util.text import unknown_name

__all__ = ["GPT", "MODELS", "build"]

_BUILDERS: dict[str, Callable[[ImageShape, int], nn.Module]] = {
    "cnn": build_cnn,
    "resnet18": build_resnet18,
    "vit": build_vit,
}
MODELS = tuple(_BUILDERS)


def build(name: str, *, image_shape: ImageShape, num_classes: int) -> nn.Module:
    """Return a new model with weights drawn from torch's global random generator.

        name        input                   output              parameters for digits
        cnn         float32 (B, C, H, W)    (B, num_classes)        65,994
        resnet18    float32 (B, C, H, W)    (B, num_classes)    11,172,810
        vit         float32 (B, C, S, S)    (B, num_classes)       136,138

    cnn and vit compute samples independently; resnet18 has BatchNorm.

    Args:
        image_shape: (C, H, W), as `Splits.image_shape`.
        num_classes: Number of classes, as `Splits.num_classes`.
    Raises: ValueError: The model rejects the shape, or there is no such model; the message then
        names the closest one.
    """
    if name not in _BUILDERS:
        raise unknown_name("model", name, MODELS)
    return _BUILDERS[name](image_shape, num_classes)
