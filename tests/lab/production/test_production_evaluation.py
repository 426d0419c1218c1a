"""Accuracy by numbers: images that rank right, right among five, and wrong, on any ranks."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from picture_folders import quick
from ranks import on_ranks
from torch import Tensor, nn

from distlab.production.evaluation import Accuracy, evaluate
from distlab.production.images import BAD
from distlab.production.optimization import ModelMean

PLACES = [0, 0, 4, 5, 7, 1, 0]  # at which the right class of an image stands among the likeliest
EXPECTED = Accuracy(top1=3 / 7, top5=5 / 7)


class Known:
    """Images whose logits are their pixels."""

    source = Mock(labels=range(len(PLACES)))

    def __init__(self, num_classes: int, unreadable: int | None = None) -> None:
        self.num_classes, self.unreadable = num_classes, unreadable

    def __len__(self) -> int:
        return len(PLACES)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        _, index = key
        logits = torch.arange(self.num_classes, 0.0, -1.0)  # class 0 is the likeliest
        is_bad = index == self.unreadable
        return logits.view(-1, 1, 1), BAD if is_bad else PLACES[index] % self.num_classes


def accuracy(images: Any, batch_size: int) -> Accuracy:
    """Evaluate with a model that knows nothing; all ranks call it."""
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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch_size", [8, 16])
def test_each_image_counts_once_on_any_number_of_ranks(size: int, batch_size: int) -> None:
    assert on_ranks(accuracy, size, Known(8), batch_size) == [EXPECTED] * size


def test_of_few_classes_the_right_one_is_always_among_five() -> None:
    assert on_ranks(accuracy, 2, Known(4), 8)[0].top5 == 1.0


def test_an_image_that_cannot_be_read_is_wrong() -> None:
    (found,) = on_ranks(accuracy, 1, Known(8, unreadable=0), 8)
    assert found == (2 / 7, 4 / 7)
