"""What one process alone computes: the judges' references, which no rank imports.

A body lies open to the submission that it calls, and must not be able to give these in its place.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phase1.models import (
    NUM_SAMPLES,
    NUM_TEST,
    STEPS,
    Odd,
    Watched,
    batch_of,
    classifier,
    network,
    state_of,
)


@cache
def odd_state(seed: int) -> dict[str, list[float]]:
    return state_of(Odd(seed))


@cache
def steps_alone(sizes: tuple[int, ...], num_steps: int, length: int = 0) -> dict[str, Any]:
    """What one process does with the batches of all ranks put together."""
    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(num_steps):
        parts = [batch_of(sizes, rank, step, length) for rank in range(len(sizes))]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        losses.append(_step_alone(model, optimizer, inputs, targets))
    return {"losses": losses, "state": state_of(model)}


def _step_alone(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> float:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@cache
def evaluate_alone(size: int, length: int = 0) -> list[float]:
    data, model = Watched(size, length=length), classifier(7)
    with torch.no_grad():
        logits = model(data.inputs).flatten(0, -2)
        targets = data.targets.flatten()
        loss = float(cross_entropy(logits, targets))
    accuracy = (logits.argmax(dim=1) == targets).double().mean()
    return [loss, float(accuracy), len(targets)]


@cache
def fit_alone(orders: tuple[tuple[int, ...], ...], epochs: int) -> dict[str, Any]:
    """One process from rank 0's weights, on the global batches in the order they were fetched."""
    model = network(3, normalised=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    data, history = Watched(NUM_SAMPLES), []
    for epoch in range(epochs):
        steps = orders[epoch * STEPS : (epoch + 1) * STEPS]
        losses = [
            _step_alone(model, optimizer, data.inputs[step], data.targets[step])
            for step in map(list, steps)
        ]
        history.append({"epoch": epoch + 1, "step_losses": losses, "test": _test(model)})
    return {"history": history, "state": state_of(model)}


def _test(model: nn.Module) -> list[float]:
    data = Watched(NUM_TEST, seed=1)
    with torch.no_grad():
        logits = model(data.inputs)
    accuracy = (logits.argmax(dim=1) == data.targets).double().mean()
    return [float(cross_entropy(logits, data.targets)), float(accuracy)]
