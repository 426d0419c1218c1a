"""Which rank sees which sample: shards of an epoch, loaders over them, batches from one rank.

Tasks 1.1 to 1.3. The docstring says what a function promises, its TODO what you need for it,
guidelines.md why and how. To grade one: ``pytest tests/test_phase1.py -k 1.1``.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from phase1_data_parallel.given import (
    Batch,
    Group,
    Sample,
    ShardLoader,
    ShardSampler,
    describe,
    empty_part,
)


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
        epoch: 0 … 2^32 - 1, equal on all ranks. Each pair of seed and epoch has its own order.
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
    # TODO 1.1: return the samples of this rank, as the table above shows them.
    #   Every rank computes the order of the epoch by itself, without a message. Refuse invalid
    #   arguments (see Raises).
    #   Tools: a numpy generator of your own, slices.
    #   Worked: 10 samples, 4 ranks, not shuffled: rank 3 gets [3, 7, 1], with drop_last [3, 7].
    #   About 10 lines.
    raise NotImplementedError("Task 1.1: shard_indices, see guidelines.md#11-shard-the-data-set")


def build_loader(
    dataset: Dataset[Sample],
    global_batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_loader_workers: int = 0,
    group: Group = None,
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
            of N; then the message names the nearest multiples, never 0.

    Cost: no communication. Each rank fetches the samples that it yields, and no others.
    """
    # TODO 1.2: return a ShardLoader that yields this rank's share of every global batch.
    #   ShardSampler and ShardLoader are given. Yours: how large a share is, what becomes of an
    #   incomplete batch, which global batches are refused, and that it is ready for epoch 0.
    #   Tools: dist.get_rank, dist.get_world_size, ShardSampler, ShardLoader, torch.Generator.
    #   Worked: 1,437 samples, global batch 64, 4 ranks: 22 batches of 16 on every rank.
    #   About 20 lines, half of them for the errors.
    raise NotImplementedError(
        "Task 1.2: build_loader, see guidelines.md#12-load-a-share-of-every-batch"
    )


def scatter_batch(
    batch: Batch | None,
    src: int = 0,
    *,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> Batch:
    """Give every rank its part of a global batch that only ``src`` holds.

    10 samples, 4 ranks: rows 0-2, 3-5, 6-7, 8-9. With fewer samples than ranks, even none, the last
    ranks get tensors of zero rows.

    Args:
        batch: on ``src`` images (B, …) and labels (B, …), any shapes, dtypes and strides; None
            elsewhere. The rows arrive unchanged, bit for bit.
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
    # TODO 1.3: every rank returns its rows, or every rank raises.
    #   Tools: describe and empty_part (given), dist.broadcast_object_list, Tensor.tensor_split,
    #   dist.isend, dist.recv. group_src= and group_dst= count inside the group.
    #   Worked: 10 rows, 4 ranks, src 0: rank 2 receives rows 6 and 7; src sends 6 messages of rows.
    #   About 20 lines.
    raise NotImplementedError("Task 1.3: scatter_batch, see guidelines.md#13-scatter-a-batch")
