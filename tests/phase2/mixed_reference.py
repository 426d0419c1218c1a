"""What one process alone computes for tasks 2.4 and 2.5: no rank imports it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from phase2.mixed_models import LR, MOMENTUM, batch_of
from phase2.worn import Worn, state_of


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
    velocity: dict[str, Tensor] = {}
    for step in range(num_steps):
        parts = [batch_of(sizes, rank, step) for rank in range(len(sizes))]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        losses.append(loss.item())
        norms.append(_step(model, loss, velocity, max_norm))
    return {"losses": losses, "norms": norms, "state": state_of(model)}


def _step(model: Worn, loss: Tensor, velocity: dict[str, Tensor], max_norm: float) -> float:
    """By hand: the first optimizer that is built takes a second."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = dict(
        zip(named, torch.autograd.grad(loss, [*named.values()], allow_unused=True), strict=True)
    )
    norm = sum(float(g.square().sum()) for g in gradients.values() if g is not None) ** 0.5
    for name, parameter in named.items():
        gradient = gradients[name]
        if gradient is not None:
            clipped = gradient * min(1.0, max_norm / norm)
            velocity[name] = MOMENTUM * velocity.get(name, torch.zeros_like(clipped)) + clipped
            parameter.data -= LR * velocity[name]
    return norm


@cache
def mean_of_means(sizes: tuple[int, ...]) -> float:
    """The first loss, if each rank weighs the same."""
    with torch.no_grad():
        batches = [batch_of(sizes, rank, 0) for rank, size in enumerate(sizes) if size]
        means = [cross_entropy(Worn()(x).flatten(0, -2), y.flatten()).item() for x, y in batches]
    return sum(means) / len(means)
