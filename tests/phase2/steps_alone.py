"""What one process alone computes for tasks 2.2 to 2.5, which no rank imports.

A body lies open to the submission that it calls, and must not be able to give these in its place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from judging.models import SGD, Worn, state_of, trainable
from phase2.steps import (
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    Dropping,
    Loss,
    Share,
    TwoHeaded,
    batch_of,
    batch_of_two,
)
from phase2_advanced.given import cross_entropy_sum

Shares = tuple[Share, ...]  # one for each rank


@cache
def steps_alone(
    shares: Shares, num_steps: int, *, with_zeros: bool = False, max_norm: float = inf
) -> dict[str, Any]:
    """What one process does with the batches of all ranks put together.

    ``with_zeros``: a parameter that nothing uses has a gradient of zero.
    """
    model = Worn()
    optimizer, losses, norms = _sgd(model), [], []
    for step in range(num_steps):
        parts = [batch_of(share, rank, step) for rank, share in enumerate(shares)]
        optimizer.zero_grad()
        total, count = cross_entropy_sum(model, tuple(map(torch.cat, zip(*parts, strict=True))))
        (total / count).backward()
        if with_zeros:
            model.unused.grad = torch.zeros_like(model.unused)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(float(total.detach() / count))
    return {"losses": losses, "norms": norms, "state": state_of(model)}


class Part(NamedTuple):
    """What a micro-batch of the first step has: the gradient of its sum, that sum, its targets."""

    gradient: list[float]
    loss: float
    targets: int


@cache
def parts_of_step(shares: Shares) -> list[list[Part]]:
    """The parts of every micro-batch of the first step, by rank."""
    return [
        [
            _part(
                *(tensor[start : start + share.starts().step] for tensor in batch_of(share, r, 0))
            )
            for start in share.starts()
        ]
        for r, share in enumerate(shares)
    ]


def _part(inputs: Tensor, targets: Tensor) -> Part:
    model = Worn()
    model.zero_grad()
    total, count = cross_entropy_sum(model, (inputs, targets))
    total.backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)]
    return Part(torch.cat([x.flatten() for x in parts]).tolist(), float(total.detach()), count)


@cache
def dropout_alone(seed: int, share: Share) -> dict[str, Any]:
    """A step with one graph over all micro-batches, whose masks are drawn in order."""
    with torch.random.fork_rng(devices=[]):
        model = Dropping()
        torch.manual_seed(seed)
        return _step(model, _split(batch_of(share, 0, 0), (share,)), cross_entropy_sum)


@cache
def two_losses_alone(shares: Shares, loss: Loss) -> dict[str, Any]:
    """A step on one batch, of which each rank has its rows."""
    whole = batch_of_two(Share(sum(share.rows for share in shares), shares[0].size))
    return _step(TwoHeaded(), _split(whole, shares), loss.sum_of)


def _split(whole: Sequence[Tensor], shares: Shares) -> Iterator[tuple[Tensor, ...]]:
    """Yield the micro-batches of all ranks, in order."""
    of_ranks = zip(*(x.split([share.rows for share in shares]) for x in whole), strict=True)
    for share, tensors in zip(shares, of_ranks, strict=True):
        yield from zip(*(tensor.split(share.size) for tensor in tensors), strict=True)


def _step(
    model: nn.Module,
    parts: Iterable[tuple[Tensor, ...]],
    loss_sum: Callable[..., tuple[Tensor, int]],
) -> dict[str, Any]:
    sums = [loss_sum(model, part) for part in parts]
    total, count = torch.stack([loss.double() for loss, _ in sums]).sum(), sum(n for _, n in sums)
    (total / count).backward()
    _sgd(model).step()
    return {"loss": float(total.detach()) / count, "state": state_of(model)}


def _sgd(model: nn.Module) -> SGD:
    return SGD(model, LR, MOMENTUM, WEIGHT_DECAY)


def scales(arguments: dict[str, Any], is_bad: Sequence[bool]) -> list[float]:
    """The scale after each update, by what torch's own GradScaler calls."""
    scale = torch.tensor(arguments["init_scale"], dtype=torch.float32)
    good_steps, values = torch.zeros((), dtype=torch.int32), []
    settings = [arguments[f"{name}_factor"] for name in ("growth", "backoff")]
    for bad in is_bad:
        num_bad = torch.tensor(float(bad))
        torch._amp_update_scale_(
            scale, good_steps, num_bad, *settings, arguments["growth_interval"]
        )
        values.append(scale.item())
    return values
