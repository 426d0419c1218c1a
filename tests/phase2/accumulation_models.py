"""Models and batches of tasks 2.1 to 2.3, for their bodies and their reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from judging.models import CLASSES, DOUBLE, FEATURES, FLAG, IGNORED, two_groups

LENGTH = 3
LR, MOMENTUM, WEIGHT_DECAY = 0.5, 0.9, 0.01


class Share(NamedTuple):
    """What one rank gets in a step."""

    rows: int
    size: int  # of a micro-batch

    @property
    def micro_batches(self) -> int:
        return -(-self.rows // self.size)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(two_groups(model), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def batch_of(share: Share, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Sequences of a rank; about a third of their targets do not count.

    The first micro-batch has one target that counts, and so differs from the others. Batches of
    even ranks have a flag in the last row.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (share.rows, LENGTH)
    inputs = torch.randn(*shape, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    targets[: share.size] = IGNORED
    targets[:1, :1] = 1
    if rank % 2 == 0:
        inputs[-1:, :1, :1] = FLAG
        targets[-1:, :1] = 0
    return inputs, targets


class Dropping(nn.Module):
    """A classifier of sequences with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.body = nn.Linear(FEATURES, 16, **DOUBLE)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, CLASSES, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.body(x))))  # type: ignore[no-any-return]


class TwoHeaded(nn.Module):
    """Predicts a class and a value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.body = nn.Linear(FEATURES, 8, **DOUBLE)
        self.label = nn.Linear(8, CLASSES, **DOUBLE)
        self.value = nn.Linear(8, 1, **DOUBLE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.label(hidden), self.value(hidden)[:, 0]


def batch_of_two(rows: int, size: int) -> tuple[Tensor, ...]:
    """Inputs, labels, values, and how many targets a row counts for.

    Those of the first micro-batch count for none, and still have a loss.
    """
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    values = torch.randn(rows, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 4, (rows,), generator=generator)
    counts[:size] = 0
    return inputs, labels, values, counts


def two_losses(
    model: nn.Module, batch: Sequence[Tensor], factor: float = 1.0
) -> tuple[Tensor, int]:
    """The sum of cross-entropies and squared errors, times a factor, and the number of targets."""
    inputs, labels, values, counts = batch
    logits, predicted = model(inputs)
    squares = (predicted - values).square().sum()
    total = cross_entropy(logits, labels, reduction="sum") + 0.3 * squares
    return total * factor, int(counts.sum())
