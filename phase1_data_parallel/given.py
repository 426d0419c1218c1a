"""The code that phase 1 gives you: loaders, timing tables, the log, and type aliases.

This file contains no task, so leave it as it is: submissions are graded with the course's own copy.
"""

import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

Sample = tuple[Tensor, Tensor | int]  # an item of a data set: image, label
Batch = tuple[Tensor, Tensor]  # an item of a loader: images (B, …), labels (B, …)
Shapes = list[tuple[torch.Size, torch.dtype]]  # shapes and dtypes of images and labels
Group = dist.ProcessGroup | None  # None: all ranks
AllReduce = Callable[[Tensor, Group], None]  # sums a tensor over the group, in place


# Loading (tasks 1.1, 1.2 and 1.5)


class ShardSampler(Sampler[int]):
    """Feeds a DataLoader the indices of one rank's shard; ``set_epoch`` chooses the order.

    Shards are cut to equal length, not padded. Padding would repeat samples, which would then count
    twice in the gradient, and it could complete a last global batch that a single process leaves
    out.

    Args:
        shard_indices: your function from task 1.1; called once per epoch, with ``drop_last``.
        num_samples: size of the data set.
        rank: this rank.
        world_size: number of shards.
        seed: seed of the run.
        shuffle: whether each epoch has its own order.
    """

    def __init__(
        self,
        shard_indices: Callable[..., list[int]],
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.shard_indices = shard_indices
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of ``epoch``, starting with the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        of_epoch = {"epoch": self.epoch, "seed": self.seed, "shuffle": self.shuffle}
        shape = (self.num_samples, self.rank, self.world_size)
        return iter(self.shard_indices(*shape, **of_epoch, drop_last=True))

    def __len__(self) -> int:
        return self.num_samples // self.world_size


class ShardLoader(DataLoader[Sample]):
    """A DataLoader over one rank's shard, with ``set_epoch``.

    Every batch is loaded with a seed of its own, so it does not matter which process loads it, nor
    what that process has loaded before. (torch seeds a process only when it starts.)
    """

    sampler: ShardSampler
    generator: torch.Generator

    def __init__(self, dataset: Dataset[Sample], *args: Any, **options: Any) -> None:
        """Accept the same arguments as ``DataLoader``.

        Raises:
            TypeError: if no generator is given.
        """
        if options.get("generator") is None:
            raise TypeError("ShardLoader needs a generator of its own: generator=torch.Generator()")
        self.first_seed = 0  # of the epoch's first batch
        super().__init__(_Seeded(dataset), *args, **options)

    def set_epoch(self, epoch: int) -> None:
        """Use the order and augmentation of ``epoch``, which must be the same on every rank."""
        self.sampler.set_epoch(epoch)
        stream = np.random.SeedSequence((self.sampler.seed, epoch, self.sampler.rank))
        self.generator.manual_seed(int(stream.generate_state(1)[0]))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch declares its own type
        self.first_seed = int(torch.randint(2**62, (), generator=self.generator))
        return super().__iter__()

    @property
    def _index_sampler(self) -> "_SeededBatches":
        """What torch iterates over, and sends to the processes batch by batch."""
        # With a strong reference, a loader that keeps its processes would be in a cycle, and the
        # garbage collector closes queues first: torch would then wait 5 s for each process.
        return _SeededBatches(weakref.proxy(self), super()._index_sampler)


class _SeededBatches:
    """The indices of a loader's batches, each batch with a seed."""

    def __init__(self, loader: ShardLoader, batches: Any) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return enumerate(self.batches, self.loader.first_seed)

    def __len__(self) -> int:
        return len(self.batches)


class _Seeded(Dataset[Sample]):
    """A data set that seeds the generators for each batch."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[index]

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[Sample]:
        seed, indices = batch
        with _seeded(seed):
            if fetch := getattr(self.dataset, "__getitems__", None):
                return list(fetch(indices))
            return [self.dataset[index] for index in indices]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that augmentation uses, and restore them afterwards for training.

    The GPUs' generators are left alone; ``torch.manual_seed`` would seed them too, and dropout
    masks would repeat.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def describe(batch: Batch | None) -> tuple[Shapes, str]:
    """Return the shapes and dtypes of a batch, and a message if it is invalid ("" otherwise)."""
    if batch is None:
        return [], "it passed None; the source rank must pass (images, labels)"
    rows = [tensor.shape[:1] for tensor in batch]  # the shape of a scalar is empty
    if rows[0] != rows[1] or not rows[0]:
        return [], f"it passed images {tuple(batch[0].shape)} and labels {tuple(batch[1].shape)}"
    return [(tensor.shape, tensor.dtype) for tensor in batch], ""


def empty_part(
    shape: torch.Size, dtype: torch.dtype, rank: int, world_size: int, device: torch.device | str
) -> Tensor:
    """Return an uninitialised tensor for the rows that ``tensor_split`` would give this rank."""
    rows = shape[0] // world_size + (rank < shape[0] % world_size)
    return torch.empty((rows, *shape[1:]), dtype=dtype, device=device)


def batches_on(loader: DataLoader[Sample], device: torch.device | str) -> Iterator[Batch]:
    """Yield a loader's batches, moved to a device; the host does not wait for a GPU's copies."""
    is_to_gpu = torch.device(device).type == "cuda"
    for batch in loader:
        inputs, targets = (x.to(device, non_blocking=is_to_gpu) for x in batch)
        yield inputs, targets


# Measuring (task 1.8)


@dataclass(frozen=True)
class AllReduceTimes:
    """The result of ``measure_all_reduce``, equal on all ranks.

    ``str()`` gives a table with a row per size and a column per strategy, followed by α and 1/β.
    """

    sizes_bytes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]  # strategy -> seconds by size; "exchange" is one message
    alpha_s: float  # latency: seconds per message; 0 if noise hides it
    bandwidth_bytes_per_s: float  # equals 1/β

    def __str__(self) -> str:
        columns = list(self.seconds)
        lines = ["     bytes" + "".join(f"{name:>22}" for name in columns)]
        for row, size in enumerate(self.sizes_bytes):
            cells = (f"{self.seconds[name][row] * 1e6:>19.1f} µs" for name in columns)
            lines.append(f"{size:>10}" + "".join(cells))
        return "\n".join([*lines, self.fit])

    @property
    def fit(self) -> str:
        """A line that reports α and 1/β."""
        latency = f"α = {self.alpha_s * 1e6:.1f} µs"
        if not self.alpha_s:
            latency = "α not measurable: small messages took no longer than their bytes"
        speed = f"1/β = {self.bandwidth_bytes_per_s / 1e9:.3f} GB/s"
        if self.bandwidth_bytes_per_s > 1e15:
            speed = "1/β not measurable: larger messages took no longer"
        return f"one message: {latency}, {speed}"


def finish(x: Tensor) -> None:
    """Wait until ``x`` has been computed; calls on a GPU return before the GPU is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


# Training (tasks 1.9 to 1.13)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies, with one target per image (B) or position (B, T)."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def count_targets(targets: Tensor) -> Tensor:
    """Return the number of targets in float64, because bfloat16 would round 303 to 304.

    Unlike ``torch.tensor(number, device=…)``, this does not wait for a GPU.
    """
    return torch.full((), targets.numel(), dtype=torch.float64, device=targets.device)


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy over a whole data set, equal on all ranks."""

    loss: float  # mean cross-entropy per target
    accuracy: float  # from 0 to 1
    num_targets: int


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards, restore each module's own previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class EpochResult:
    """Results of one epoch of ``Trainer.fit``; losses and accuracy cover all ranks."""

    epoch: int
    step_losses: tuple[float, ...]
    test_loss: float
    test_accuracy: float  # from 0 to 1
    images_per_s: float  # training images per second over all ranks, including loading

    @property
    def train_loss(self) -> float:
        """Mean of the step losses."""
        return sum(self.step_losses) / len(self.step_losses)


class RankLog:
    """Prints lines that begin with ``rank k/N``, and one progress bar for all ranks."""

    def __init__(self, group: Group = None) -> None:
        self.rank = dist.get_rank(group)
        self.prefix = f"rank {self.rank}/{dist.get_world_size(group)}"
        self.shows_bar = self.rank == 0 and sys.stderr.isatty()

    def info(self, message: str) -> None:
        """Print a message on rank 0 only, because it is the same on all ranks."""
        if self.rank == 0:
            self._print(message)

    def warning(self, message: str) -> None:
        """Print a message that concerns only this rank; any rank may print it."""
        self._print(message)

    def _print(self, message: str) -> None:
        # Write text and newline together; otherwise, lines of ranks that share a pipe could mix.
        print(f"{self.prefix}  {message}\n", end="", flush=True)

    def progress(self, label: str, done: int, total: int) -> None:
        """Redraw ``epoch 2 [####····] 11/22`` on rank 0, in a terminal only; erase it when full."""
        if not self.shows_bar:
            return
        bar = ("#" * (20 * done // total)).ljust(20, "·")
        line = f"\r{self.prefix}  {label} [{bar}] {done}/{total}"
        print("\r\x1b[K" if done == total else line, end="", file=sys.stderr, flush=True)


# On GPUs (tasks 1.14 and 1.15)


class StepNumbers(NamedTuple):
    """What a training step reports, equal on all ranks."""

    loss: float  # mean cross-entropy per target, before the step
    accuracy: float  # from 0 to 1, before the step
    gradient_norm: float  # before clipping


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return a batch of the same form, with ``function(x)`` for each tensor x.

    A batch is a tensor, or a tuple, list or dict of batches; whatever else is in it stays as it is.
    """
    return tree_map_only(Tensor, function, batch)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream of a GPU; None if the device is not a GPU."""
    is_gpu = device.type == "cuda"
    return torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
