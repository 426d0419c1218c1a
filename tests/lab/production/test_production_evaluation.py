"""Known predictions are counted as right, in the top five, or wrong, on any number of ranks."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from picture_folders import quick
from ranks import on_ranks
from torch import Tensor, nn

from distlab.production.evaluation import Evaluation, evaluate
from distlab.production.optimization import ModelMean
from distlab.production.samples import BAD

pytestmark = pytest.mark.usefixtures("fast_ranks")

PLACES = [0, 0, 4, 5, 7, 1, 0]  # position of each image's true class among the predictions


class Known:
    """Images whose logits are their pixels."""

    source = Mock(labels=range(len(PLACES)))

    def __init__(self, num_classes: int, unreadable: int | None = None) -> None:
        self.num_classes, self.unreadable = num_classes, unreadable

    def __len__(self) -> int:
        return len(PLACES)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        _, index = key
        logits = torch.arange(self.num_classes, 0.0, -1.0)  # class 0 is the most likely
        is_bad = index == self.unreadable
        return logits.view(-1, 1, 1), BAD if is_bad else PLACES[index] % self.num_classes


def accuracy(images: Any, batch_size: int) -> Evaluation:
    """Evaluate a model that returns its input as logits; all ranks must call this function."""
    strategy = Mock(
        replicas=None,
        num_replicas=dist.get_world_size(),
        device=torch.device("cpu"),
        module=nn.Identity(),
        computes=True,
        counts=True,
        autocast=nullcontext,
        predict=lambda pixels: pixels.flatten(1),
    )
    config = quick(batch_size=batch_size)
    return evaluate(strategy, images, config, ModelMean(nn.Identity(), 0.0), Mock())


def accuracies() -> list[tuple[float, float]]:
    small_and_large_batches = [accuracy(Known(8), size)[:2] for size in (8, 16)]
    few_classes, one_unreadable = accuracy(Known(4), 8), accuracy(Known(8, unreadable=0), 8)
    return [*small_and_large_batches, few_classes[:2], one_unreadable[:2]]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_each_image_counts_once_on_any_number_of_ranks(size: int) -> None:
    for found in on_ranks(accuracies, size, backend="sim"):
        assert found[:2] == [(3 / 7, 5 / 7)] * 2
        assert found[2][1] == 1.0, "of few classes, the right one is always among five"
        assert found[3] == (2 / 7, 4 / 7), "an image that cannot be read is wrong"
