"""Bodies for tasks 1.9 to 1.13."""

import io
import operator
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from phase1.groups import error_of

FEATURES, CLASSES = 6, 3


class Odd(nn.Module):
    """Has what breaks careless code: buffers, frozen, tied, unused and channels_last parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4).double()
        self.norm.running_mean.fill_(float(seed))  # type: ignore[union-attr]
        self.norm.num_batches_tracked.fill_(seed)  # type: ignore[union-attr]
        self.first = nn.Linear(3, 3, bias=False).double()
        self.tied = nn.Linear(3, 3).double()
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(2).double(), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(5).double())
        self.register_buffer("hidden", torch.full((2,), float(seed)), persistent=False)


def _state(module: nn.Module) -> dict[str, list[float]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().double().flatten().tolist() for name, tensor in named}


# 1.9


def odd_state(lesson: Any, seed: int) -> dict[str, list[float]]:
    return _state(Odd(seed))


def broadcast_odd(lesson: Any, src: int, group: Any = None) -> dict[str, Any]:
    module = Odd(dist.get_rank(group) + 1)
    before = [*module.parameters(), *module.buffers()]
    lesson.broadcast_parameters(module, src, group)
    after = [*module.parameters(), *module.buffers()]
    return {
        "state": _state(module),
        "same objects": len(before) == len(after) and all(map(operator.is_, before, after)),
        "trainable": [p.requires_grad for p in module.parameters()],
    }


def size_of_odd() -> int:
    module = Odd(0)
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])


# 1.10


def gradients_of(rank: int) -> dict[str, Tensor | None]:
    """What a rank has after backward: odd ranks have not used ``sometimes``."""
    module, gradients = Odd(0), {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        generator = torch.Generator().manual_seed(100 * rank + number)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        has_one = parameter.requires_grad and not (name == "sometimes" and rank % 2)
        gradients[name] = drawn if has_one else None
    return gradients


def average_odd(lesson: Any, function: str, group: Any = None) -> dict[str, Any]:
    """The gradients after averaging, and what was given to the all-reduce."""
    module = Odd(0)
    gradients = gradients_of(dist.get_rank(group))
    for name, parameter in module.named_parameters():
        drawn = gradients[name]
        if drawn is not None:  # laid out as the parameter, as autograd does
            parameter.grad = torch.empty_like(parameter).copy_(drawn)
    calls, all_reduce = _counting()
    getattr(lesson, function)(module, all_reduce, group)
    means = {
        name: None if p.grad is None else p.grad.flatten().tolist()
        for name, p in module.named_parameters()
    }
    return {"means": means, "calls": calls}


def _counting() -> tuple[list[int], Callable[..., None]]:
    """An all-reduce as any of the lesson's, and the list of the sizes it was called with."""
    calls: list[int] = []

    def all_reduce(x: Tensor, group: Any = None) -> None:
        if not x.is_contiguous():
            raise ValueError("all_reduce was given a tensor that is not contiguous")
        calls.append(x.numel())
        dist.all_reduce(x, group=group)

    return calls, all_reduce


# 1.11


def classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return nn.Sequential(*layers).double()


def batch_of(sizes: list[int], rank: int, step: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """The rank's inputs and targets; ``length`` targets each for sequences."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (sizes[rank], length) if length else (sizes[rank],)
    inputs = torch.randn(*shape, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, shape, generator=generator)


def train_steps(
    lesson: Any, sizes: list[int], num_steps: int, length: int = 0, group: Any = None
) -> dict[str, Any]:
    """Losses and final weights, with momentum; weights start equal."""
    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(num_steps):
        batch = batch_of(sizes, dist.get_rank(group), step, length)
        losses.append(float(lesson.train_step(model, optimizer, batch, group=group)))
    return {"losses": losses, "state": _state(model)}


def steps_alone(sizes: list[int], num_steps: int, length: int = 0) -> dict[str, Any]:
    """What one process does with the batches of all ranks put together."""
    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(num_steps):
        parts = [batch_of(sizes, rank, step, length) for rank in range(len(sizes))]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        losses.append(_step_alone(model, optimizer, inputs, targets))
    return {"losses": losses, "state": _state(model)}


def _step_alone(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> float:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def step_with_arguments(lesson: Any) -> dict[str, Any]:
    """Which of the functions given were used, and how often."""
    calls, all_reduce = _counting()
    averaged = []

    def average(module: nn.Module, reduce: Any, group: Any) -> None:
        averaged.append(reduce is all_reduce)
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)

    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = batch_of([3] * dist.get_world_size(), dist.get_rank(), 0)
    lesson.train_step(model, optimizer, batch, all_reduce=all_reduce, average=average)
    return {"all_reduce": len(calls), "average": averaged}


def step_without_data(lesson: Any) -> str:
    model = classifier(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    empty = batch_of([0] * dist.get_world_size(), dist.get_rank(), 0)
    return error_of(lambda: lesson.train_step(model, optimizer, empty))


# 1.12


class Watched(Dataset[tuple[Tensor, Tensor]]):
    """Notes which samples are fetched; each takes 1 ms (of virtual time, where it is simulated)."""

    def __init__(self, size: int, seed: int = 0, length: int = 0) -> None:
        self.inputs, self.targets = batch_of([size], 0, seed, length)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fetched.append(int(index))
        time.sleep(0.001)
        return self.inputs[index], self.targets[index]


class Moody(nn.Module):
    """A classifier with dropout, one part of it frozen in evaluation mode; notes its modes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = classifier(7), nn.Dropout(0.5)
        self.drop.eval()
        self.noted: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        modes = {"in training mode": self.training, "with gradients": torch.is_grad_enabled()}
        self.noted |= {name for name, is_on in modes.items() if is_on}
        return self.drop(self.body(x))  # type: ignore[no-any-return]


def evaluate(
    lesson: Any, size: int, batch_size: int, length: int = 0, group: Any = None
) -> dict[str, Any]:
    model, data = Moody(), Watched(size, length=length)
    modes = [module.training for module in model.modules()]
    found = lesson.evaluate(model, data, batch_size=batch_size, group=group)
    return {
        "found": [float(found.loss), float(found.accuracy), int(found.num_targets)],
        "fetched": data.fetched,
        "restored": modes == [module.training for module in model.modules()],
        "noted": sorted(model.noted),
    }


def evaluate_alone(size: int, length: int = 0) -> list[float]:
    data, model = Watched(size, length=length), classifier(7)
    with torch.no_grad():
        logits = model(data.inputs).flatten(0, -2)
        targets = data.targets.flatten()
        loss = float(cross_entropy(logits, targets))
    accuracy = (logits.argmax(dim=1) == targets).double().mean()
    return [loss, float(accuracy), len(targets)]


def evaluate_nothing(lesson: Any) -> str:
    return error_of(lambda: lesson.evaluate(classifier(7), Watched(0)))


# 1.13

GLOBAL_BATCH, NUM_SAMPLES, NUM_TEST = 8, 27, 11
STEPS = NUM_SAMPLES // GLOBAL_BATCH
_PRINTED: dict[int, list[str]] = {}


class _ByRank(io.TextIOBase):
    """Keeps what is printed, by rank: simulated ranks share one standard output."""

    def write(self, text: str) -> int:
        _PRINTED.setdefault(dist.get_rank(), []).append(text)
        return len(text)


def _network(seed: int, *, normalised: bool) -> nn.Module:
    model = classifier(seed)
    if normalised:
        norm = nn.BatchNorm1d(8).double()
        return nn.Sequential(model[0], norm, *list(model)[1:])  # type: ignore[index,arg-type]
    return model


def fit(lesson: Any, epochs: int, *, normalised: bool = False, group: Any = None) -> dict[str, Any]:
    """Train from weights that differ by rank, in evaluation mode at first."""
    sys.stdout = _ByRank()
    model = _network(dist.get_rank(group) + 3, normalised=normalised).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    calls, all_reduce = _counting()
    train, test = Watched(NUM_SAMPLES), Watched(NUM_TEST, seed=1)
    trainer = lesson.Trainer(model, optimizer, all_reduce=all_reduce, group=group)
    history = trainer.fit(train, test, epochs=epochs, global_batch_size=GLOBAL_BATCH, seed=5)
    return {
        "history": [_entry(result) for result in history],
        "images_per_s": [float(result.images_per_s) for result in history],
        "state": _state(model),
        "fetched": train.fetched,
        "all_reduces": len(calls),
        "printed": "".join(_PRINTED.get(dist.get_rank(), [])),
    }


def fit_normalised(lesson: Any, epochs: int) -> dict[str, Any]:
    return fit(lesson, epochs, normalised=True)


def fit_in_group(lesson: Any, epochs: int) -> dict[str, Any] | None:
    """Train on ranks 1 and 2 of the world; the others do nothing."""
    group = dist.new_group([1, 2])
    return fit(lesson, epochs, group=group) if dist.get_rank() in (1, 2) else None


def _entry(result: Any) -> dict[str, Any]:
    return {
        "epoch": int(result.epoch),
        "step_losses": [float(loss) for loss in result.step_losses],
        "test": [float(result.test_loss), float(result.test_accuracy)],
    }


def fit_alone(orders: list[list[int]], epochs: int) -> dict[str, Any]:
    """One process from rank 0's weights, on the global batches in the order they were fetched."""
    model = _network(3, normalised=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    data, history = Watched(NUM_SAMPLES), []
    for epoch in range(epochs):
        steps = orders[epoch * STEPS : (epoch + 1) * STEPS]
        losses = [
            _step_alone(model, optimizer, data.inputs[step], data.targets[step]) for step in steps
        ]
        history.append({"epoch": epoch + 1, "step_losses": losses, "test": _test(model)})
    return {"history": history, "state": _state(model)}


def _test(model: nn.Module) -> list[float]:
    data = Watched(NUM_TEST, seed=1)
    with torch.no_grad():
        logits = model(data.inputs)
    accuracy = (logits.argmax(dim=1) == data.targets).double().mean()
    return [float(cross_entropy(logits, data.targets)), float(accuracy)]


def fit_what_cannot_be_shared(lesson: Any) -> str:
    model = classifier(7)
    trainer = lesson.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.3))
    data = Watched(NUM_SAMPLES)
    return error_of(lambda: trainer.fit(data, data, epochs=1, global_batch_size=7))
