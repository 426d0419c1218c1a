"""What one process alone computes for tasks 2.2 and 2.3, which no rank imports.

A body lies open to the submission that it calls, and must not be able to give these in its place.
"""

from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from judging.models import IGNORED, SGD, Worn, state_of
from phase2.accumulation_models import (
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    Dropping,
    Share,
    TwoHeaded,
    batch_of,
    batch_of_two,
    two_losses,
)

Shares = tuple[Share, ...]  # by rank


def _loss_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    logits = model(inputs).flatten(0, -2)
    total = cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, int((targets != IGNORED).sum())


@cache
def steps_alone(
    shares: Shares, num_steps: int, *, with_zeros: bool = False, max_norm: float = inf
) -> dict[str, Any]:
    """What one process does with the batches of all ranks put together.

    ``with_zeros``: a parameter that nothing uses has a gradient of zero.
    """
    model = Worn()
    optimizer, losses = _sgd(model), []
    for step in range(num_steps):
        parts = [batch_of(share, rank, step) for rank, share in enumerate(shares)]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        total, count = _loss_sum(model, inputs, targets)
        (total / count).backward()
        if with_zeros:
            model.unused.grad = torch.zeros_like(model.unused)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return {"losses": losses, "state": state_of(model)}


@cache
def parts_of_step(shares: Shares) -> list[list[tuple[list[float], float, int]]]:
    """Gradient of the sum, loss and targets of every micro-batch of the first step, by rank."""
    return [
        [
            _part(*(tensor[start : start + share.size] for tensor in batch_of(share, rank, 0)))
            for start in range(0, share.rows, share.size)
        ]
        for rank, share in enumerate(shares)
    ]


def _part(inputs: Tensor, targets: Tensor) -> tuple[list[float], float, int]:
    model = Worn()
    model.zero_grad()
    total, count = _loss_sum(model, inputs, targets)
    total.backward()
    return flat(model), float(total.detach()), count


def flat(model: nn.Module) -> list[float]:
    """The gradients of the trainable parameters, one after the other."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    return torch.cat([part.flatten() for part in parts]).tolist()


@cache
def dropout_alone(seed: int, share: Share) -> dict[str, Any]:
    """A step with one graph over all micro-batches, whose masks are drawn in order."""
    model = Dropping()
    inputs, targets = batch_of(share, 0, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pairs = zip(inputs.split(share.size), targets.split(share.size), strict=True)
        sums = [_loss_sum(model, *pair) for pair in pairs]
    return _step(model, torch.stack([total for total, _ in sums]).sum(), sum(n for _, n in sums))


@cache
def two_losses_alone(share: Share, factor: float) -> dict[str, Any]:
    model = TwoHeaded()
    return _step(model, *two_losses(model, batch_of_two(share.rows, share.size), factor))


def _step(model: nn.Module, total: Tensor, count: int) -> dict[str, Any]:
    (total / count).backward()
    _sgd(model).step()
    return {"loss": float(total.detach()) / count, "state": state_of(model)}


def _sgd(model: nn.Module) -> SGD:
    return SGD(model, LR, MOMENTUM, WEIGHT_DECAY)
