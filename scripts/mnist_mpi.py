"""Count the all-reduces in an epoch of MNIST: one per gradient, one for all, or one per bucket.

    mpirun -np 2 python scripts/mnist_mpi.py
    torchrun --nproc-per-node 2 scripts/mnist_mpi.py
    python scripts/mnist_mpi.py                       # starts two processes itself

This trains the network of LizarDist's report three times with the functions of Phases 1 and 3, and
counts the calls. MNIST is read if its files are in ``$DISTLAB_DATA`` or ``data``; otherwise the
images are synthetic. An epoch of 60,000 images takes two cores half a minute; ``--images 6000``
takes a tenth of that.

Source: github.com/adelbennaceur/lizardist, benchmark/gradient_bucketing_benchmark.md.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from distlab import data, launch
from distlab.data.download import data_root
from distlab.launch.launchers import launched
from distlab.process_group.base import BaseGroup
from phase1_data_parallel.given import Sample, batches_on
from phase3_multi_node.given import Group, Started, start_all_reduce
from solutions.phase1_data_parallel.data_loader import shard_indices
from solutions.phase1_data_parallel.trainer import (
    average_gradients,
    average_gradients_flat,
    train_step,
)
from solutions.phase3_multi_node.ddp import DistributedDataParallel

NUM_IMAGES, RANKS_ALONE = 60_000, 2
BATCH, LR = 128, 0.05  # BATCH is the size per rank
REPORTED_CALLS, REPORTED_IN_BUCKETS = 1_880, 235  # LizarDist's calls per epoch
REPORTED = (
    f"LizarDist's report: {REPORTED_CALLS:,} / {REPORTED_IN_BUCKETS:,} = "
    f"{REPORTED_CALLS / REPORTED_IN_BUCKETS:.2f}\n"
    "  as 60,000 images on 2 ranks, 128 at a time, are 235 steps, and 235 x 8 tensors are 1,880"
)


class Counted:
    """Sums gradients over the ranks, and counts calls and bytes."""

    def __init__(self) -> None:
        self.calls = self.num_bytes = 0

    def start(self, x: Tensor, group: Group = None) -> Started:
        """Start summing a tensor in place, as Phase 3 requires."""
        self.calls += 1
        self.num_bytes += x.nbytes
        return start_all_reduce(x, group)

    def all_reduce(self, x: Tensor, group: Group = None) -> None:
        """Sum a tensor in place, as Phase 1 requires."""
        self.start(x, group).wait()


# Takes a model; returns the model that a step calls, and a function that averages its gradients.
Way = Callable[[nn.Module, Counted], tuple[nn.Module, Callable[[], None]]]


def one_by_one(model: nn.Module, counted: Counted) -> tuple[nn.Module, Callable[[], None]]:
    """Sum each gradient by itself, after the backward pass."""
    return model, lambda: average_gradients(model, counted.all_reduce)


def at_once(model: nn.Module, counted: Counted) -> tuple[nn.Module, Callable[[], None]]:
    """Sum all gradients in one flat tensor, after the backward pass."""
    return model, lambda: average_gradients_flat(model, counted.all_reduce)


def in_buckets(model: nn.Module, counted: Counted) -> tuple[nn.Module, Callable[[], None]]:
    """Sum gradients in buckets during the backward pass; the first bucket has room for all."""
    parallel = DistributedDataParallel(model, all_reduce=counted.start)
    return parallel, parallel.finish_gradient_synchronization


WAYS: dict[str, Way] = {
    "one by one (1.10)": one_by_one,
    "all at once (1.10)": at_once,
    "in buckets (3.11)": in_buckets,
}


@dataclass(frozen=True)
class Epoch:
    """Results of an epoch on this rank; the losses are means over all ranks."""

    losses: list[float]
    calls: int
    num_bytes: int
    calls_of_group: int  # calls for gradients and losses; 0 on gloo and NCCL, which do not count


def convnet() -> nn.Sequential:
    """Return LizarDist's network, 206,922 parameters in 8 tensors, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def images(num_images: int) -> tuple[str, Dataset[Sample]]:
    """Return the name and the first training images of MNIST, or of synthetic data of its shape."""
    if (data_root() / "MNIST/raw").is_dir():
        splits = data.load("mnist")
    else:
        splits = data.load("synthetic", image_shape=(1, 28, 28), train_size=num_images, test_size=1)
    return splits.name, Subset(splits.train, range(min(num_images, len(splits.train))))


def shard_of(dataset: Dataset[Sample]) -> DataLoader[Sample]:
    """Return a loader over this rank's share of an epoch; the last batch may be smaller."""
    num_images = len(dataset)  # type: ignore[arg-type]
    mine = shard_indices(num_images, dist.get_rank(), dist.get_world_size(), drop_last=True)
    return DataLoader(Subset(dataset, mine), batch_size=BATCH)


def train(way: Way, loader: DataLoader[Sample], device: torch.device) -> Epoch:
    """Train a new network for an epoch."""
    counted, plain = Counted(), convnet().to(device)
    model, average = way(plain, counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    before = counted_by_group()
    losses = [
        train_step(model, optimizer, batch, average=lambda *_: average())
        for batch in batches_on(loader, device)
    ]
    by_group = counted_by_group() - before
    return Epoch(losses, counted.calls, counted.num_bytes, by_group)


def counted_by_group() -> int:
    """Return how many all-reduces the process group has counted; torch's own groups count none."""
    group = dist.group.WORLD
    return group.counts.calls["all_reduce"] if isinstance(group, BaseGroup) else 0


def backend() -> str:
    """Return "mpi", "gloo" or "nccl"."""
    group = dist.group.WORLD
    return group.world_name if isinstance(group, BaseGroup) else dist.get_backend()


def compare(num_images: int) -> None:
    """Train in every way on this rank; rank 0 prints the report."""
    name, dataset = images(num_images)
    loader, device = shard_of(dataset), launch.context().device
    epochs = {title: train(way, loader, device) for title, way in WAYS.items()}
    if dist.get_rank() == 0:
        size = len(dataset)  # type: ignore[arg-type]
        print(report(f"{size:,} images ({name})", epochs), flush=True)


def report(subject: str, epochs: dict[str, Epoch]) -> str:
    """Return a report: the calls of each way, their ratio, and how much the losses differ."""
    first, _, buckets = epochs.values()
    num_steps, num_tensors = len(first.losses), len([*convnet().parameters()])
    ranks = dist.get_world_size()
    rows = [row(title, epoch) for title, epoch in epochs.items()]
    lines = [
        f"{subject} on {ranks} ranks ({backend()}): {num_steps:,} steps of {ranks} x {BATCH}",
        f"{'gradients':<20}{'all-reduces':>12}{'bytes each':>12}{'in all':>13}{'loss':>18}",
        *rows,
        f"factor: {first.calls:,} / {buckets.calls:,} = {first.calls / buckets.calls:.2f}. "
        f"One by one, {num_steps:,} steps x {num_tensors} tensors",
        difference([epoch.losses for epoch in epochs.values()]),
    ]
    if first.calls_of_group:
        counts = ", ".join(f"{epoch.calls_of_group:,}" for epoch in epochs.values())
        lines.append(f"calls counted by the group: {counts}; one in each step is for the loss")
    return "\n".join([*lines, REPORTED])


def row(title: str, epoch: Epoch) -> str:
    """Return a line of the table."""
    bytes_each = epoch.num_bytes // epoch.calls
    loss = f"{epoch.losses[0]:.4f} -> {epoch.losses[-1]:.4f}"
    return f"{title:<20}{epoch.calls:>12,}{bytes_each:>12,}{epoch.num_bytes:>13,}{loss:>18}"


def difference(losses: list[list[float]]) -> str:
    """Return a line with the largest difference between the ways' losses in any step."""
    largest = max(max(step) - min(step) for step in zip(*losses, strict=True))
    if not largest:
        return f"losses: the same in all {len(losses[0]):,} steps, bit for bit"
    return f"losses: in {len(losses[0]):,} steps never further apart than {largest:.1e}"


def main() -> None:
    """Train in the world that a launcher has started, or in a new one of two processes."""
    parser = argparse.ArgumentParser(description="all-reduces of an epoch, in three ways")
    parser.add_argument("--images", type=int, default=NUM_IMAGES, help="images of all ranks")
    options = parser.parse_args()
    world = launched()
    num_ranks = world.world_size if world else RANKS_ALONE
    if options.images < num_ranks:
        parser.error(f"--images {options.images}: each of {num_ranks} ranks needs one or more")
    launch.run(compare, num_ranks, options.images, timeout_s=None)


if __name__ == "__main__":
    main()
