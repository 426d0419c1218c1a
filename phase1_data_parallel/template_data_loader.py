"""Share samples among ranks: shards of an epoch, loaders over shards, batches from one rank.

Tasks 1.1, 1.2 and 1.5. Each docstring says what the function promises, its TODO gives an example,
and guidelines.md explains why and how. To grade one task: ``distlab check 1.1``.
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
    """List the samples that ``rank`` sees in ``epoch``; every rank gets the same number.

    Ranks take samples in turn from the epoch's order, so the samples that all ranks see in one step
    form one slice of this order. It depends only on num_samples, seed, epoch and shuffle, so every
    rank computes the same order. With 7 samples on 3 ranks, not shuffled:
        order      0 1 2 3 4 5 6           drop_last=True
        padded     0 1 2 3 4 5 6 0 1       0 1 2 3 4 5
        rank 0     0     3     6           0     3
        rank 1       1     4     0           1     4
        rank 2         2     5     1           2     5

    Args:
        num_samples: size of the data set, at least 1.
        rank: number of this rank, 0 … world_size - 1.
        world_size: number of shards.
        epoch: number of the epoch, 0 … 2^32 - 1, the same on all ranks. Each pair of seed and epoch
            has its own order.
        seed: seed of the run, 0 … 2^32 - 1, the same on all ranks.
        shuffle: True for a random order, with all orders equally likely; False for the order of
            the data set.
        drop_last: True to drop the samples at the end of the order that cannot be shared equally.
            False to pad the order with samples from its start, several times over if there are
            fewer samples than ranks.

    Returns:
        ⌈num_samples / world_size⌉ indices, or ⌊…⌋ with ``drop_last``, as a list of Python ints.

    Raises:
        ValueError: if ``rank`` is not in 0 … world_size - 1, or there are no samples.

    Cost: no communication; time and memory O(num_samples + world_size). The global generators of
        random, numpy and torch are left as they are.
    """
    # TODO 1.1: return the samples of this rank, as the table above shows them.
    #   Every rank computes the order of the epoch by itself, without messages. Reject invalid
    #   arguments (see Raises).
    #   Example: 10 samples, 4 ranks, not shuffled: rank 3 gets [3, 7, 1], with drop_last [3, 7].
    #   About 10 lines.
    raise NotImplementedError("Task 1.1: shard_indices, see guidelines.md#11-shard-the-data-set")


def build_loader(
    dataset: Dataset[Sample],
    global_batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_loader_workers: int = 0,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    group: Group = None,
) -> ShardLoader:
    """Build a DataLoader that yields this rank's share, 1/N, of every global batch.

    Together, the N batches of a step are the global batch that one process would have drawn, so the
    number of ranks does not change the training. With global_batch_size 64:
        1 rank: 64 a step        4 ranks: 16 each        3 ranks: ValueError (use 63 or 66)
    The samples are those of ``shard_indices`` with ``drop_last``, in the same order. The last,
    incomplete global batch of an epoch is left out (with shuffling, the next epoch leaves out
    different samples).

    Args:
        dataset: map-style data set of (image, label), the same on all ranks.
        global_batch_size: number of samples in one step, over all ranks; a multiple of N.
        seed: seed of the run; fixes the order and the augmentation. The random numbers that
            augmentation draws from torch, numpy or ``random`` differ by rank and epoch, but are the
            same each time the run is repeated or resumed, whichever processes load the samples.
            They do not affect the numbers that training draws: building the loader and loading
            samples leave the global generators as they are.
        shuffle: True for a new order in every epoch; False for the order of the data set.
        num_loader_workers: number of processes that load data; with 0, this process loads it.
        persistent_workers: True to keep these processes from one epoch to the next; False to start
            new ones in each epoch. Ignored if there are none.
        pin_memory: True for batches in page-locked memory, from which a GPU copies while the host
            goes on. Ignored, without a warning, if ``torch.cuda.is_available()`` is False.
        group: the ranks that share the data; all by default.

    Returns:
        The loader, set to epoch 0; its length is the number of steps in an epoch. Call
        ``set_epoch(epoch)`` before each epoch; otherwise every epoch has the same order.

    Raises:
        ValueError: if the global batch is less than 1, larger than the data set, or not a multiple
            of N; in the last case, the message names the nearest multiples, but never 0.

    Cost: no communication. Each rank fetches only the samples that it yields.
    """
    # TODO 1.2: return a ShardLoader that yields this rank's share of every global batch.
    #   ShardSampler and ShardLoader are given. You decide how large a share is, what becomes of an
    #   incomplete batch and which global batches to reject, and make the loader ready for epoch 0.
    #   Example: 1,437 samples, global batch 64, 4 ranks: 22 batches of 16 on every rank.
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
    """Give every rank its share of a global batch that only ``src`` holds.

    With 10 samples, 4 ranks get rows 0-2, 3-5, 6-7 and 8-9. If there are fewer samples than ranks,
    or none at all, the last ranks get tensors with zero rows.

    Args:
        batch: images (B, …) and labels (B, …) on ``src``, of any shape, dtype and strides; None
            elsewhere. The rows arrive unchanged, bit for bit.
        src: the rank inside ``group`` that holds the batch.
        device: the device that ``batch`` is on, and on which the other ranks return their rows.
            With NCCL, this must be a GPU: the shapes and dtypes travel there, too.
        group: the ranks that share the batch; all by default.

    Returns:
        This rank's rows of images and labels, as a tuple; on ``src``, they are views of ``batch``.

    Raises:
        ValueError: on every rank, with the same message, if ``src`` has no batch, or if images and
            labels differ in length.

    Cost: one broadcast of the shapes (broadcast_object_list: 2 collectives, less than 1,000 bytes).
        Then ``src`` sends 2 messages, images and labels, to every other rank that gets rows: 2(N-1)
        messages in all, with (N-1)/N of the batch's bytes. Nothing else is sent, and every send has
        finished on return. Memory: the other ranks hold only their rows; ``src`` does not copy a
        contiguous batch.
    """
    # TODO 1.5: every rank returns its rows, or every rank raises the error.
    #   Example: 10 rows, 4 ranks, src 0: rank 2 receives rows 6 and 7; src sends 6 messages.
    #   About 20 lines.
    raise NotImplementedError("Task 1.5: scatter_batch, see guidelines.md#15-scatter-a-batch")
