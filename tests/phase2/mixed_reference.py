"""What one process alone computes for tasks 2.4 and 2.5: no rank imports it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from judging.models import SGD, Worn, state_of
from phase2.mixed_models import LR, MOMENTUM, batch_of


def scales(arguments: dict[str, Any], is_bad: Sequence[bool]) -> list[float]:
    """The scale after each update, by what torch's own GradScaler calls."""
    scale = torch.tensor(arguments["init_scale"], dtype=torch.float32)
    good_steps, found = torch.zeros((), dtype=torch.int32), []
    settings = [arguments[f"{name}_factor"] for name in ("growth", "backoff")]
    for bad in is_bad:
        num_bad = torch.tensor(float(bad))
        torch._amp_update_scale_(
            scale, good_steps, num_bad, *settings, arguments["growth_interval"]
        )
        found.append(scale.item())
    return found


@cache
def steps_alone(sizes: tuple[int, ...], num_steps: int, max_norm: float) -> dict[str, Any]:
    """SGD with momentum, clipped, on the batches of all ranks put together, in float64."""
    model, losses, norms = Worn(), [], []
    optimizer = SGD(model, LR, MOMENTUM)
    for step in range(num_steps):
        parts = [batch_of(sizes, rank, step) for rank in range(len(sizes))]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        norms.append(_clipped(model, max_norm))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "state": state_of(model)}


def _clipped(model: Worn, max_norm: float) -> float:
    """Clip the gradients by hand; return their norm before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient *= min(1.0, max_norm / norm)
    return norm


@cache
def mean_of_means(sizes: tuple[int, ...]) -> float:
    """The first loss, if each rank weighs the same."""
    with torch.no_grad():
        batches = [batch_of(sizes, rank, 0) for rank, size in enumerate(sizes) if size]
        means = [cross_entropy(Worn()(x).flatten(0, -2), y.flatten()).item() for x, y in batches]
    return sum(means) / len(means)
