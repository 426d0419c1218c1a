"""The judges' reference results, computed in a single process.

Ranks must not import this module: a submission can inspect the code that calls it, and must not
find the expected results there.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from judging.models import Worn
from phase1 import gpu, models


@cache
def odd_state(seed: int) -> dict[str, list[float]]:
    return models.state_of(models.Odd(seed))


@cache
def steps_alone(sizes: tuple[int, ...], num_steps: int, length: int = 0) -> dict[str, Any]:
    """Train in one process on the joined batches of all ranks; return losses and final weights."""
    model = Worn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(num_steps):
        parts = [models.batch_of(sizes, rank, step, length) for rank in range(len(sizes))]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "state": models.state_of(model)}


@cache
def evaluate_alone(size: int, length: int = 0, rank: int = 0, world_size: int = 1) -> list[float]:
    """Return the loss, accuracy and number of targets for all samples, or for one rank's share."""
    data, model = models.Watched(size, length=length), models.classifier(7)
    with torch.no_grad():
        logits = model(data.inputs[rank::world_size]).flatten(0, -2)
        targets = data.targets[rank::world_size].flatten()
        loss = float(cross_entropy(logits, targets))
    accuracy = (logits.argmax(dim=1) == targets).double().mean()
    return [loss, float(accuracy), len(targets)]


Steps = tuple[tuple[tuple[int, ...], ...], ...]  # samples by step and rank


@cache
def fit_alone(
    orders: Steps, calls: tuple[int, ...], *, normalised: bool = False, lr: float = models.LR
) -> dict[str, Any]:
    """Train in one process from rank 0's weights, on the batches that the ranks have fetched.

    Each rank's share of a batch is normalised separately, as on N ranks; after every epoch, all
    ranks adopt rank 0's statistics.
    """
    alone, steps, histories = _Alone(normalised, lr), iter(orders), []
    for epochs in calls:
        history = []
        for epoch in range(epochs):
            losses = [alone.step(next(steps)) for _ in range(models.STEPS)]
            history.append({"epoch": epoch + 1, "step_losses": losses, "test": alone.evaluate()})
        histories.append(history)
    return {"histories": histories, "state": models.state_of(alone.model)}


class _Alone:
    """Training in one process, with a separate set of buffers for each rank."""

    def __init__(self, normalised: bool, lr: float) -> None:
        self.model = models.network(models.FIRST_SEED, normalised=normalised)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.data = models.Watched(models.NUM_SAMPLES)
        self.test = models.Watched(models.NUM_TEST, seed=1)
        self.buffers: dict[int, list[Tensor]] = {}  # by rank; emptied after each epoch

    def step(self, by_rank: tuple[tuple[int, ...], ...]) -> float:
        count, total = sum(map(len, by_rank)), 0.0
        start = self._copied()
        self.optimizer.zero_grad()
        self.model.train()
        for rank, samples in enumerate(map(list, by_rank)):
            self._use(self.buffers.get(rank, start))
            logits = self.model(self.data.inputs[samples])
            loss = cross_entropy(logits, self.data.targets[samples], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
            self.buffers[rank] = self._copied()
        self._use(self.buffers[0])
        self.optimizer.step()
        return total

    def evaluate(self) -> list[float]:
        """Evaluate with rank 0's buffers, from which all ranks then start the next epoch."""
        self.buffers = {}
        self.model.eval()
        with torch.no_grad():
            logits = self.model(self.test.inputs)
        accuracy = (logits.argmax(dim=1) == self.test.targets).double().mean()
        return [float(cross_entropy(logits, self.test.targets)), float(accuracy)]

    def _copied(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.model.buffers()]

    def _use(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.model.buffers(), values, strict=True):
            buffer.copy_(value)


@cache
def state_at_start(normalised: bool) -> dict[str, list[float]]:
    return models.state_of(models.network(models.FIRST_SEED, normalised=normalised))


@cache
def first_losses(sizes: tuple[int, ...], length: int = 0) -> list[float]:
    """Return the mean loss of each rank's own first batch, or NaN for an empty batch."""
    with torch.no_grad():
        batches = [models.batch_of(sizes, rank, 0, length) for rank in range(len(sizes))]
        logits = [Worn()(inputs).flatten(0, -2) for inputs, _ in batches]
        return [
            float(cross_entropy(a, b[1].flatten())) for a, b in zip(logits, batches, strict=True)
        ]


@cache
def steps_ahead_alone(steps: gpu.Steps) -> dict[str, Any]:
    """Take the steps in one process on the joined batches; return their numbers and the weights."""
    model = Worn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=steps.momentum)
    found = []
    for step in range(steps.num_steps):
        batches = [steps.batch(rank, step) for rank in range(len(steps.sizes))]
        optimizer.zero_grad()
        found.append(_numbers_of(model, batches))
        norm, factor = found[-1][2], min(1.0, steps.max_norm / (found[-1][2] or 1.0))
        for gradient in (p.grad for p in model.parameters() if p.grad is not None):
            gradient.copy_(gradient * factor if norm < float("inf") else torch.zeros(()))
        optimizer.step()
    return {"numbers": found, "state": models.state_of(model)}


def _numbers_of(model: Worn, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Return loss, accuracy and gradient norm; leave the gradients in the model."""
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    logits, targets = model(inputs).flatten(0, -2), targets.flatten()
    loss = cross_entropy(logits, targets)
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    accuracy = (logits.argmax(dim=-1) == targets).double().mean()
    return [float(loss.detach()), float(accuracy), norm**0.5]


def own_numbers(steps: gpu.Steps, rank: int) -> dict[str, float]:
    """Return the numbers of a rank's own first batch."""
    model = Worn()
    model.zero_grad()
    return dict(zip(gpu.NAMES, _numbers_of(model, [steps.batch(rank, 0)]), strict=True))
