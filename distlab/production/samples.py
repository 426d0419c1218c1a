"""Samples of any data set: their keys, targets and shapes."""

import torch
from torch import Tensor

from distlab.production.config import Config
from distlab.production.types import Batch

BAD = -100  # target without a loss, which cross_entropy ignores: of unreadable and blank samples
Key = tuple[int, int]  # epoch and index, which determine how a sample is augmented
Sample = tuple[Tensor, Tensor | int]  # inputs, targets


def dtype_of(config: Config) -> torch.dtype:
    """Return the dtype of images and parameters outside of autocast."""
    return torch.float64 if config.precision == "fp64" else torch.float32


def blank(config: Config, count: int, side: int | None = None) -> Batch:
    """Return samples that change no gradient: black images, or texts of token 0, without targets.

    Args:
        side: Side of the images; by default ``image_size``.

    Returns:
        Inputs and targets: (count, 3, S, S) and int64 (count,), or twice int64 (count, T).
    """
    if config.is_language:
        shape = count, config.sequence_length
        return torch.zeros(shape, dtype=torch.int64), torch.full(shape, BAD)
    side = side or config.image_size
    return torch.zeros(count, 3, side, side, dtype=dtype_of(config)), torch.full((count,), BAD)


def of_predictions(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the target of each prediction: of each image, or of each token.

    Args:
        outputs: Logits, (B, C) of images or (B, T, V) of texts.
        targets: (B,) or (B, T) classes, or (B, C) class probabilities.

    Returns:
        Logits (P, C), in 32 bits or more, and targets (P,) or (P, C), for P = B images or P = B T
        tokens.
    """
    logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if outputs.dim() > 2:
        return logits.flatten(0, 1), targets.flatten()
    return logits, targets.to(logits.dtype) if targets.is_floating_point() else targets
