"""Bodies (functions that ranks run) for tasks 1.14 and 1.15, and the loaders they pass."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from judging.calls import numbers
from judging.comparing import noting_changes
from judging.models import CLASSES, FEATURES, Worn
from judging.tensors import given_group, own_device
from phase1 import models

NAMES = ("loss", "accuracy", "gradient_norm")
COPIED = torch.Size([64, 128])  # shape of the batches whose copies are timed, 32 KiB

# Task 1.14: steps ahead of the GPU


class Steps(NamedTuple):
    """What steps are taken.

    Attributes:
        sizes: Each rank's number of samples in every step.
        bad: In step 1, an input of the last rank with samples is this number; 0 for none.
        length: Length of sequences; 0 if samples are not sequences.
    """

    sizes: tuple[int, ...]
    max_norm: float
    momentum: float = 0.0
    bad: float = 0.0
    length: int = 0
    num_steps: int = 3

    def batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return a rank's inputs and targets in a step."""
        inputs, targets = models.batch_of(self.sizes, rank, step, self.length)
        if self.bad and step == 1 and rank == max(r for r, size in enumerate(self.sizes) if size):
            inputs[..., 0] = self.bad
        return inputs, targets


def steps_ahead(lesson: Any, steps: Steps, group: Any = None) -> dict[str, Any]:
    """Take steps from equal weights, starting with stale gradients.

    Returns:
        The numbers and their types, the final weights, the rows of each forward pass, and what
        the steps have changed.
    """
    rank, device = dist.get_rank(group), own_device(group)
    model = Worn().to(device)
    model.frozen.grad = torch.full_like(model.frozen, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=steps.momentum)
    more = {"max_norm": steps.max_norm, **given_group(group)}
    found, changed = [], set[str]()
    for step in range(steps.num_steps):
        inputs, targets = (x.to(device) for x in steps.batch(rank, step))
        with noting_changes(inputs=inputs.nan_to_num(), targets=targets) as now_changed:
            found.append(_numbers(lesson, model, optimizer, (inputs, targets), **more))
        changed |= {*now_changed}
    return {
        "numbers": [[float(number) for number in of_step] for of_step in found],
        "types": sorted({type(n).__name__ for of_step in found for n in of_step} - {"float"}),
        "state": models.state_of(model),
        "rows": model.rows,
        "changed": sorted(changed),
    }


def _numbers(lesson: Any, *args: Any, **named: Any) -> list[Any]:
    """Take a step; return its numbers as they are, after a check that there are three."""
    found = lesson.train_step_ahead(*args, **named)
    numbers("train_step_ahead", found, NAMES)
    return [*found]


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(device)


NUM_ELEMENTS = sum(p.numel() for p in small_model(torch.device("cpu")).parameters())


class Noting(torch.optim.SGD):
    """An optimizer that notes at each step whether the GPU has already done all work before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.5)
        self.is_idle: list[bool] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        if own_device().type == "cuda":
            self.is_idle.append(torch.cuda.current_stream().query())
        super().step(closure)


def steps_of_small_model(lesson: Any, sizes: Sequence[int], num_steps: int) -> dict[str, Any]:
    """Take steps in float32 with a model and batches on the rank's device.

    Returns:
        Whether the GPU was idle at each of the optimizer's steps.
    """
    rank, device = dist.get_rank(), own_device()
    model = small_model(device)
    optimizer = Noting(model)
    for step in range(num_steps):
        inputs, targets = models.batch_of(sizes, rank, step)
        batch = inputs.float().to(device), targets.to(device)
        lesson.train_step_ahead(model, optimizer, batch, max_norm=0.1)
    return {"is_idle": optimizer.is_idle}


def step_at_the_optimum(lesson: Any, size: int) -> dict[str, Any]:
    """Take a step where every loss and every gradient is exactly zero, and one tensor trainable."""
    device = own_device()
    model = nn.Linear(FEATURES, CLASSES, dtype=torch.float64).to(device)
    model.weight.requires_grad_(False)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()[0] = 1000.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = models.batch_of([size] * dist.get_world_size(), dist.get_rank(), 0)
    before = models.state_of(model)
    batch = inputs.to(device), torch.zeros_like(targets).to(device)
    found = _numbers(lesson, model, optimizer, batch)
    after = models.state_of(model)
    return {"numbers": [float(x) for x in found], "changed": before != after, "state": after}


def step_by_default(lesson: Any, x: float) -> dict[str, Any]:
    """Take a step from weights of zero, without a max_norm; the gradient is (-x/2, x/2)."""
    device = own_device()
    model = nn.Linear(1, 2, bias=False, dtype=torch.float64).to(device)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = torch.full((2, 1), x, dtype=torch.float64, device=device)
    batch = inputs, torch.zeros(2, dtype=torch.int64, device=device)
    found = _numbers(lesson, model, optimizer, batch)
    return {"norm": float(found[2]), "weights": model.weight.flatten().tolist()}


def step_without_targets(lesson: Any) -> dict[str, Any]:
    """Take a step where no rank has a target; return its numbers, and whether weights changed."""
    model = Worn().to(own_device())
    before = models.state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = models.batch_of([0] * dist.get_world_size(), dist.get_rank(), 0)
    found = _numbers(lesson, model, optimizer, tuple(x.to(own_device()) for x in batch))
    return {"numbers": [str(float(x)) for x in found], "changed": models.state_of(model) != before}


# Task 1.15: a prefetcher


class Loader:
    """A loader of nested batches in the host's memory, which counts those that were taken."""

    def __init__(self, num_batches: int, shape: Sequence[int] = (2, 3)) -> None:
        self.num_batches, self.shape = num_batches, shape
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.num_batches):
            self.taken += 1
            yield self.batch(number)

    def batch(self, number: int) -> Any:
        """Return a batch, which is different from all others."""
        with torch.device("cpu"):
            x = torch.full(tuple(self.shape), float(number))
            return {"x": x, "more": (x + 0.5, [x[0].long(), f"name {number}"])}


def batches_of(num_batches: int) -> list[str]:
    """Return what ``prefetched`` should find in one iteration."""
    loader = Loader(num_batches)
    return [_plain(loader.batch(number)) for number in range(num_batches)]


def _plain(batch: Any) -> str:
    """Return the values of a batch, with the brackets of dicts, tuples and lists."""
    return repr(tree_map(lambda x: x.tolist() if isinstance(x, Tensor) else x, batch))


def prefetched(lesson: Any, num_batches: int) -> list[dict[str, Any]]:
    """Iterate twice; return the batches, their devices, and how many had been taken at each."""
    device, loader = own_device(), Loader(num_batches)
    prefetcher = lesson.Prefetcher(loader, device)
    found = []
    for _ in range(2):
        loader.taken = 0
        batches, devices, taken = [], set[str](), []
        for batch in prefetcher:
            taken.append(loader.taken)
            tree_map_only(Tensor, lambda x, to=devices: to.add(x.device.type), batch)
            batches.append(_plain(batch))
        found.append({"batches": batches, "devices": sorted(devices), "taken": taken})
    return [{**of_pass, "device": device.type} for of_pass in found]


def use_on_own_stream(lesson: Any, num_batches: int, is_pinned: bool) -> list[float]:
    """Use batches on a stream that the caller has chosen, and drop each; return their means."""
    loader: Any = Loader(num_batches, COPIED)
    if is_pinned:
        with torch.device("cpu"):
            loader = [tree_map_only(Tensor, Tensor.pin_memory, batch) for batch in loader]
    means = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for batch in lesson.Prefetcher(loader, own_device()):
            means.append(batch["x"].mean() + batch["more"][0].mean())
            del batch
        return [float(mean) for mean in means]


def times_of_copies(lesson: Any, num_batches: int) -> dict[str, float]:
    """Return the seconds that a copy, a use, and a loop over all batches take."""
    device = own_device()
    with torch.device("cpu"):
        batches = [torch.ones(COPIED).pin_memory() for _ in range(num_batches)]
    batch = batches[0].to(device)
    return {
        "copy_s": _seconds(lambda: batches[0].to(device, non_blocking=True)),
        "use_s": _seconds(lambda: _use(batch)),
        "loop_s": _seconds(lambda: [_use(x) for x in lesson.Prefetcher(batches, device)]),
    }


def _use(x: Tensor) -> float:
    """Use a batch, and read a number, as a training step does."""
    for _ in range(4):
        x = x * 1.5
    return float(x.sum())


def _seconds(run: Any) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s
