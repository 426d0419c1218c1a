"""Images as sequences of tokens, on which a GPT can be trained ("image GPT")."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distlab.data.splits import ImageShape, SizedDataset, Splits


@dataclass(frozen=True)
class TokenSplits:
    """The two splits of a dataset of token sequences, and the properties a language model needs."""

    name: str
    train: SizedDataset[tuple[Tensor, Tensor]]  # inputs, targets: int64 (sequence_length,)
    test: SizedDataset[tuple[Tensor, Tensor]]
    num_classes: int  # size of the vocabulary: tokens are 0 .. num_classes - 1
    image_shape: ImageShape
    sequence_length: int


def tokens(splits: Splits, levels: int = 17) -> TokenSplits:
    """Turn each image into a sequence of its pixels, row by row, rounded to ``levels`` grey values.

        image            2 x 2, pixels 0 and 16:   . #      tokens   0 16 16  0
        inputs, targets                            # .               0 16 16 | 16 16 0

    The target at position t is the token at t + 1. In colour images, the channels of a pixel are
    adjacent tokens. The digits, whose pixels range from 0 to 16, lose nothing with 17 levels.

    Returns: the splits, with sequence_length = C * H * W - 1; a sample is (inputs, targets).
    Raises: ValueError: ``levels`` is below 2.
    Source: Chen et al. 2020, Generative Pretraining from Pixels, section 2.
    """
    if levels < 2:
        raise ValueError(f"levels must be at least 2 (black and white), got {levels}")
    return TokenSplits(
        name=splits.name,
        train=_TokenDataset(splits.train, splits, levels),
        test=_TokenDataset(splits.test, splits, levels),
        num_classes=levels,
        image_shape=splits.image_shape,
        sequence_length=math.prod(splits.image_shape) - 1,
    )


class _TokenDataset(SizedDataset[tuple[Tensor, Tensor]]):
    def __init__(
        self, images: SizedDataset[tuple[Tensor, int]], splits: Splits, levels: int
    ) -> None:
        self._images = images
        self._top = levels - 1
        self._mean = torch.tensor(splits.mean).view(-1, 1, 1)
        self._std = torch.tensor(splits.std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, _ = self._images[index]
        sequence = self._quantise(image)
        return sequence[:-1], sequence[1:]

    def _quantise(self, image: Tensor) -> Tensor:
        """Return the image's tokens, (C * H * W,) int64 in 0 .. levels - 1."""
        pixels = image * self._std + self._mean  # undo the normalisation: back to [0, 1]
        levels = (pixels * self._top).round().clamp(0, self._top)
        return levels.long().movedim(0, -1).flatten()
