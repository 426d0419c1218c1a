"""All-reduce along trees: partial sums go up to the root, and the whole sum comes back down.

Tasks 3.4 and 3.5. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 3.4``.
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phase3_multi_node.given import Group

SEGMENT_BYTES = 2**19


def tree_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` over all ranks, in place: a reduce to rank 0 along a tree, then a broadcast.

    In every round, ranks with a partial sum pair up, and one of each pair sends its sum to the
    other. In the end, rank 0 has the whole sum; then the rounds run in reverse, to send it back.
    For N = 6:
        round 0    1→0  3→2  5→4            round 3    0→4
        round 1    2→0                      round 4    0→2
        round 2    4→0                      round 5    0→1  2→3  4→5
    Other trees of the same cost are also allowed, both on the way up and on the way down.

    Args:
        x: contiguous tensor of any size; same shape and dtype on all ranks. On return, it holds the
            sum, bit for bit the same on all ranks, and the caller may overwrite it (with NCCL: by
            operations on the current stream).
        group: the ranks that take part; all by default.

    Cost: 2⌈log2 N⌉ rounds of α + nβ seconds for n bytes; N-1 messages of n bytes up, and as many
        down; no collective; at most one extra tensor of the size of ``x`` on each rank.
    Source: Thakur, Rabenseifner and Gropp 2005, section 4.2 (binomial tree).
    """
    # TODO 3.4: let every rank end with the sum, by way of rank 0.
    #   Example: 6 ranks hold 1, 2, 4, 8, 16 and 32. Ranks 1, 2, 4 send 2, 12 and 48 up, and all
    #   hold 63 after 10 messages.
    #   About 15 lines.
    raise NotImplementedError(
        "Task 3.4: tree_all_reduce, see guidelines.md#34-all-reduce-along-a-tree"
    )


def double_tree(world_size: int) -> tuple[list[int], list[int]]:
    """Return two binary trees over ranks 0 … N-1 that together give all ranks about the same work.

    For example, for N = 6, where ranks with children in one tree are leaves of the other:
              3                     4
           ┌──┴──┐               ┌──┴──┐
           1     5               2     0
         ┌─┴─┐ ┌─┘             ┌─┴─┐ ┌─┘
         0   2 4               1   3 5
        [1, 3, 1, -1, 5, 3]   [4, 2, 4, 2, -1, 0]
    Any two trees are allowed if in each of them, no rank is more than ⌈log2 N⌉ edges away from the
    root, and no rank has more than two children in the two trees together.

    Args:
        world_size: N, at least 1.

    Returns:
        For each tree, the parents of ranks 0, 1, 2, …, with -1 for the root. The result is the same
        on all ranks, without any communication.

    Source: Sanders, Speck and Träff 2009.
    """
    # TODO 3.5: return the parents of all ranks in both trees.
    #   Example: double_tree(3) may be ([1, -1, 1], [2, 2, -1]).
    #   About 12 lines.
    raise NotImplementedError("Task 3.5: double_tree, see guidelines.md#35-two-trees-each-for-half")


def double_binary_tree_all_reduce(
    x: Tensor, group: Group = None, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Sum ``x`` over all ranks, in place: one half along each of two trees, segment by segment.

    The first half of ``x``, as ``tensor_split`` cuts it, uses the first tree of ``double_tree``;
    the other half uses the second tree, at the same time. Each half is sent in S segments, which
    are added up on their way to the root; then the sums come back down. While a rank passes on a
    segment, it receives the next one:
        step               0           1           2           3
        children → rank    segment 0   segment 1   segment 2
        rank → parent                  segment 0   segment 1   segment 2
    Ranks cannot deadlock, not even on NCCL.

    Args:
        x: contiguous tensor of any size; same shape and dtype on all ranks. On return, it holds the
            sum, bit for bit the same on all ranks, and the caller may overwrite it (with NCCL: by
            operations on the current stream).
        group: the ranks that take part; all by default.
        segment_bytes: maximum size of a message, at least that of one element; the same on all
            ranks.

    Cost: each half goes up and down every edge of its tree once. So in each direction, a rank sends
        at most n bytes, and receives at most n bytes (one element more if ``x`` has an odd number
        of elements). With segments of s bytes, each direction takes at most S + ⌈log2 N⌉ - 1
        steps of α + 2sβ seconds. Together, the two directions take 2nβ + 2Sα seconds if there are
        many segments, and at most 2⌈log2 N⌉ steps if there is only one. No collective. Extra memory
        for at most four segments.
    Source: Sanders, Speck and Träff 2009; NCCL's trees.
    """
    # TODO 3.5: sum both halves at the same time, each along its tree.
    #   Example: 1,000 float32 numbers on 4 ranks with segments of 512 bytes: halves of 500 numbers
    #   are 4 segments of 125, and each way takes 5 steps.
    #   About 50 lines, with your own helpers.
    raise NotImplementedError(
        "Task 3.5: double_binary_tree_all_reduce, see guidelines.md#35-two-trees-each-for-half"
    )
