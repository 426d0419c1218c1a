"""Which rank sees which sample: shards of an epoch, loaders over them, batches from one rank."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

Sample = tuple[Tensor, Tensor | int]  # what a data set yields: image, label
Batch = tuple[Tensor, Tensor]  # what a loader yields: images (B, …), labels (B, …)
Shapes = list[tuple[torch.Size, torch.dtype]]


def shard_indices(
    num_samples: int,
    rank: int,
    world_size: int,
    *,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> list[int]:
    """List the samples that ``rank`` sees in ``epoch``; all ranks get equally many.

    Ranks take turns in the epoch's order, so that step k of all ranks together is one slice of it.
    The order is a function of num_samples, seed, epoch and shuffle, and of nothing else: every rank
    computes the same one. 7 samples, 3 ranks, not shuffled:
        order      0 1 2 3 4 5 6           drop_last=True
        padded     0 1 2 3 4 5 6 0 1       0 1 2 3 4 5
        rank 0     0     3     6           0     3
        rank 1       1     4     0           1     4
        rank 2         2     5     1           2     5

    Args:
        num_samples: size of the data set, at least 1.
        rank: this rank, 0 … world_size - 1.
        world_size: number of shards.
        epoch: 0 … 2^32 - 1, equal on all ranks. Each pair of seed and epoch has its own draw.
        seed: of the run, 0 … 2^32 - 1, equal on all ranks.
        shuffle: draw a random order, each as likely as any other; False keeps that of the data set.
        drop_last: cut the tail that does not fill all ranks. Otherwise the order is wrapped round,
            as often as it takes where there are fewer samples than ranks.

    Returns:
        ⌈num_samples / world_size⌉ indices, or ⌊…⌋ with ``drop_last``: a list of Python's own ints.

    Raises:
        ValueError: ``rank`` is outside the world, or there is no sample.

    Cost: no communication; time and memory O(num_samples + world_size). The global generators of
        random, numpy and torch are left as they are.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
    if num_samples < 1:
        raise ValueError(f"a data set of {num_samples} samples cannot be sharded")
    order = np.arange(num_samples)
    if shuffle:
        order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    per_rank = num_samples // world_size if drop_last else -(-num_samples // world_size)
    equal_for_all = np.resize(order, per_rank * world_size)  # cuts, or repeats from the start
    shard: list[int] = equal_for_all[rank::world_size].tolist()
    return shard


class ShardSampler(Sampler[int]):
    """Feeds a DataLoader the indices of one rank's shard; ``set_epoch`` draws a new order.

    Shards are cut, not padded: a sample that comes twice would count twice in the gradient, and
    padding could fill a global batch that one process would have left out.
    """

    def __init__(
        self, num_samples: int, rank: int, world_size: int, *, seed: int, shuffle: bool
    ) -> None:
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of ``epoch`` from the next iteration on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(
            shard_indices(
                self.num_samples,
                self.rank,
                self.world_size,
                epoch=self.epoch,
                seed=self.seed,
                shuffle=self.shuffle,
                drop_last=True,
            )
        )

    def __len__(self) -> int:
        return self.num_samples // self.world_size


class ShardLoader(DataLoader[Sample]):
    """A DataLoader over one rank's shard, with ``set_epoch``."""

    sampler: ShardSampler
    generator: torch.Generator

    def set_epoch(self, epoch: int) -> None:
        """Draw the order and the augmentation of ``epoch``; call it on every rank, same number."""
        self.sampler.set_epoch(epoch)
        stream = np.random.SeedSequence((self.sampler.seed, epoch, self.sampler.rank))
        self.generator.manual_seed(int(stream.generate_state(1)[0]))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its own iterator
        batches = super().__iter__()
        if self.num_workers:
            yield from batches  # torch has seeded every worker process from ``generator``
            return
        for _ in range(len(self)):
            with _seeded_from(self.generator):
                batch = next(batches)
            yield batch


@contextmanager
def _seeded_from(generator: torch.Generator) -> Iterator[None]:
    """Seed what augmentation draws from, and put it back, so that the training draws on as before.

    Not ``torch.manual_seed``: it would seed the GPUs too, and dropout would repeat itself.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = int(torch.randint(2**32, (), generator=generator))
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def build_loader(
    dataset: Dataset[Sample],
    global_batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_loader_workers: int = 0,
    group: dist.ProcessGroup | None = None,
) -> ShardLoader:
    """Build a DataLoader over this rank's shard that yields 1/N of the global batch.

    The N batches of a step are together the global batch that one process would have drawn, so
    the number of workers does not change the training. global_batch_size 64:
        1 rank: 64 a step        4 ranks: 16 each        3 ranks: ValueError (use 63 or 66)
    The shard is that of ``shard_indices`` with ``drop_last``, in its order. The last, incomplete
    global batch of an epoch is left out (the next epoch's order differs).

    Args:
        dataset: map-style, equal on all ranks; yields (image, label).
        global_batch_size: samples of all ranks in one step; a multiple of N.
        seed: of the run; it fixes order and augmentation. What augmentation draws from torch, numpy
            or ``random`` differs by rank and epoch, repeats when the run is repeated, and takes no
            numbers from the training: building and loading leave the global generators alone.
        shuffle: new order in every epoch; False keeps that of the data set.
        num_loader_workers: processes that load; 0 loads in this process.
        group: the ranks that share the data; all by default.

    Returns:
        The loader, in epoch 0; its length is the number of steps. Call ``set_epoch(epoch)`` before
        each epoch, or every epoch has the same order.

    Raises:
        ValueError: the global batch is less than 1, or larger than the data set, or not a multiple
            of N; then the message names the nearest multiples, of which 0 is none.

    Cost: no communication. Each rank fetches the samples that it yields, and no others.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    num_samples = len(dataset)  # type: ignore[arg-type]
    loader = ShardLoader(
        dataset,
        batch_size=_equal_share(global_batch_size, world_size, num_samples),
        sampler=ShardSampler(num_samples, rank, world_size, seed=seed, shuffle=shuffle),
        drop_last=True,
        num_workers=num_loader_workers,
        generator=torch.Generator(),  # of augmentation
    )
    loader.set_epoch(0)
    return loader


def _equal_share(global_batch_size: int, world_size: int, num_samples: int) -> int:
    """Samples of each rank in one step."""
    share, rest = divmod(global_batch_size, world_size)
    if rest or share < 1:
        below = max(share, 0) * world_size
        nearest = f"{below} or {below + world_size}" if below else str(world_size)
        raise ValueError(
            f"a global batch of {global_batch_size} cannot be shared equally by {world_size} "
            f"ranks: use {nearest}"
        )
    if global_batch_size > num_samples:
        raise ValueError(
            f"a global batch of {global_batch_size} needs more than the {num_samples} samples "
            "there are: every epoch would be empty"
        )
    return share


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Batch:
    """Give every rank its part of a global batch that only ``src`` holds.

    10 samples, 4 ranks: rows 0-2, 3-5, 6-7, 8-9. With fewer samples than ranks, even none, the last
    ranks get tensors of zero rows.

    Args:
        batch: on ``src`` images (B, …) and labels (B, …), any shapes, dtypes and strides; None
            elsewhere. The rows arrive bit by bit as they are.
        src: the rank inside ``group`` that holds the batch.
        device: where the other ranks receive and return their rows; the device of ``batch``.
        group: the ranks that share the batch; all by default.

    Returns:
        This rank's rows of images and labels, a tuple; on ``src`` views of ``batch``.

    Raises:
        ValueError: on every rank, with the same message, if ``src`` has no batch, or images and
            labels differ in length.

    Cost: one broadcast of the shapes (broadcast_object_list: 2 collectives, less than 1,000 bytes).
        Then ``src`` sends every other rank that gets rows 2 messages, images and labels: 2(N-1) in
        all, (N-1)/N of the batch's bytes. Nothing else is sent, and no send is under way at the
        end. Memory: the other ranks hold their rows only; ``src`` copies nothing of a contiguous
        batch.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    header: list[Shapes | str] = [_describe(batch) if rank == src else ""]
    dist.broadcast_object_list(header, group=group, group_src=src, device=torch.device(device))
    shapes = header[0]
    if isinstance(shapes, str):  # everybody raises, so nobody waits for a batch
        raise ValueError(f"scatter_batch from rank {src}: {shapes}")

    if batch is not None and rank == src:
        return _send_parts(batch, src, group)
    images, labels = (_empty_part(s, dtype, rank, world_size, device) for s, dtype in shapes)
    for part in (images, labels):
        if part.numel():
            dist.recv(part, group=group, group_src=src)
    return images, labels


def _send_parts(batch: Batch, src: int, group: dist.ProcessGroup | None) -> Batch:
    """Send every other rank its rows of images and labels; return those of ``src``."""
    world_size = dist.get_world_size(group)
    images, labels = (tensor.tensor_split(world_size) for tensor in batch)
    sends = [
        dist.isend(part.contiguous(), group=group, group_dst=to)
        for to in range(world_size)
        for part in (images[to], labels[to])
        if to != src and part.numel()
    ]
    for send in sends:  # until then the network may still read the rows
        if send is not None:  # isend gives None outside the group only
            send.wait()
    return images[src], labels[src]


def _describe(batch: Batch | None) -> Shapes | str:
    """Shape and dtype of images and labels, or what is wrong with them."""
    if batch is None:
        return "it passed None; the source rank must pass (images, labels)"
    rows = [tensor.shape[:1] for tensor in batch]  # of a single number: none
    if rows[0] != rows[1] or not rows[0]:
        return f"it passed images {tuple(batch[0].shape)} and labels {tuple(batch[1].shape)}"
    return [(tensor.shape, tensor.dtype) for tensor in batch]


def _empty_part(
    shape: torch.Size, dtype: torch.dtype, rank: int, world_size: int, device: torch.device | str
) -> Tensor:
    """Room for the rows that ``tensor_split`` gives this rank."""
    rows = shape[0] // world_size + (rank < shape[0] % world_size)
    return torch.empty((rows, *shape[1:]), dtype=dtype, device=device)
