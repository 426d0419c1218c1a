"""All-reduce around a ring: every rank sends only to its right neighbour, one chunk at a time.

Tasks 3.1 to 3.3. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 3.1``.
"""

from collections import deque
from collections.abc import Sequence
from itertools import cycle
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phase3_multi_node.given import Group, exchange, start_exchange

SEGMENT_BYTES = 2**23


def ring_reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` over all ranks, and return this rank's chunk of the sum.

    The chunks are those of ``tensor_split``: N parts, of which the first few are one element longer
    if N does not divide the size. In each of N-1 steps, every rank sends a chunk to its right
    neighbour, rank r+1, and adds the chunk that arrives from its left neighbour to its own copy of
    that chunk. For N = 4, these are the indices of the chunks that the ranks send:
                 r0  r1  r2  r3
        step 0    3   0   1   2
        step 1    2   3   0   1
        step 2    1   2   3   0      then rank r holds the complete sum of chunk r
    Ranks cannot deadlock, not even on NCCL, because the send and the receive of a step start in one
    batch.

    Args:
        x: contiguous tensor of any size, even less than N; same shape and dtype on all ranks. The
            sums are computed in its memory; afterwards, only this rank's chunk of it is defined.
            The caller may overwrite ``x`` as soon as this function returns (with NCCL: by
            operations on the current stream).
        group: the ranks that take part; all by default.

    Returns:
        Chunk r of the sum on rank r: a one-dimensional view of ``x``.

    Cost: N-1 messages per rank, each of one chunk, which may be empty; together, they carry (N-1)/N
        of the bytes of ``x``. (N-1)α + (N-1)/N·nβ seconds for n bytes; no collective; one chunk of
        extra memory.
    Source: Patarasuk and Yuan 2009, section 3; Thakur, Rabenseifner and Gropp 2005, section 4.3.
    """
    # TODO 3.1: add up the chunks on their way round the ring, and return this rank's.
    #   Example: 10 numbers on 4 ranks are chunks of 3, 3, 2 and 2. Rank 1 sends 3 messages, of 3, 2
    #   and 2 numbers, and returns a view of 3 numbers.
    #   About 9 lines.
    raise NotImplementedError(
        "Task 3.1: ring_reduce_scatter, see guidelines.md#31-reduce-scatter-around-a-ring"
    )


def ring_all_gather(x: Tensor, group: Group = None) -> None:
    """Collect the chunks of all ranks in ``x``, in place.

    In each of N-1 steps, every rank sends a chunk to its right neighbour, rank r+1: first its own
    chunk, then in each step the one that has just arrived. For N = 4, these are the indices of the
    chunks that the ranks send:
                 r0  r1  r2  r3
        step 0    0   1   2   3
        step 1    3   0   1   2
        step 2    2   3   0   1
    Ranks cannot deadlock, not even on NCCL, because the send and the receive of a step start in one
    batch.

    Args:
        x: contiguous tensor of any size; same shape and dtype on all ranks. The chunks are those of
            ``tensor_split``: rank r contributes chunk r, and its other chunks are overwritten. The
            caller may overwrite ``x`` as soon as this function returns (with NCCL: by operations
            on the current stream).
        group: the ranks that take part; all by default.

    Cost: N-1 messages per rank, each of one chunk; together, they carry (N-1)/N of the bytes of
        ``x``. (N-1)α + (N-1)/N·nβ seconds for n bytes; no collective, and no extra memory.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.1 (ring algorithm).
    """
    # TODO 3.2: let every rank end with the chunks of all.
    #   Example: 10 numbers on 4 ranks are chunks of 3, 3, 2 and 2. Rank 1 sends 3 messages, of 3, 3
    #   and 2 numbers.
    #   About 6 lines.
    raise NotImplementedError(
        "Task 3.2: ring_all_gather, see guidelines.md#32-the-second-half-and-the-whole"
    )


def ring_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place: a reduce-scatter around the ring, then an all-gather.

    Args:
        x: contiguous tensor of any size; same shape and dtype on all ranks. On return, it holds the
            sum, bit for bit the same on all ranks, and the caller may overwrite it (with NCCL: by
            operations on the current stream).
        group: the ranks that take part; all by default.

    Cost: 2(N-1) messages per rank, each of one chunk, to its right neighbour; together, they carry
        2(N-1)/N of the bytes of ``x``, the least that any all-reduce can send if only ranks add.
        2(N-1)α + 2(N-1)/N·nβ seconds for n bytes; no collective; one chunk of extra memory.
    Source: Patarasuk and Yuan 2009, section 3.
    """
    # TODO 3.2: let every rank end with the sum of all x, for the least bytes.
    #   Example: 1,000 float32 numbers on 4 ranks: each rank sends 6 messages of 1,000 bytes.
    #   About 2 lines.
    raise NotImplementedError(
        "Task 3.2: ring_all_reduce, see guidelines.md#32-the-second-half-and-the-whole"
    )


def segmented_ring_all_reduce(
    x: Tensor, group: Group = None, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Sum ``x`` over all ranks, in place, around a ring whose links stay busy while ranks add.

    Every chunk is sent in segments. While a rank adds a segment that has arrived, it is already
    receiving the next segment and sending one of its own:
        link      segment 0   segment 1   segment 2   segment 3
        adding                segment 0   segment 1   segment 2   segment 3

    Args:
        x: contiguous tensor of any size; same shape and dtype on all ranks. On return, it holds the
            sum, bit for bit the same on all ranks, and the caller may overwrite it (with NCCL: by
            operations on the current stream).
        group: the ranks that take part; all by default.
        segment_bytes: maximum size of a message, at least that of one element; the same on all
            ranks.

    Cost: each rank sends as many bytes as in ``ring_all_reduce``, to the same neighbour, in at most
        S times as many messages, where S is the number of segments of the longest chunk.
        2(N-1)·S·α + 2(N-1)/N·nβ seconds if adding a segment takes no longer than sending it; with S
        = 16, a tenth more is allowed, so the last addition of each step need not overlap. No
        collective. Extra memory for two segments.
    Source: Hu et al. 2025 (arXiv 2507.04786): NCCL splits the chunks of its rings in this way.
    """
    # TODO 3.3: do as ring_all_reduce, with the next segment on its way while one is added.
    #   Example: 1,000 float32 numbers on 2 ranks with segments of 512 bytes: chunks of 500 numbers
    #   are 4 segments, and each rank sends 8 messages, of 4,000 bytes in all.
    #   About 20 lines.
    raise NotImplementedError(
        "Task 3.3: segmented_ring_all_reduce, see guidelines.md#33-overlap-adding-and-receiving"
    )
