"""All-reduce along trees: partial sums go up to the root, and the whole sum comes back down."""

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
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    arrived = torch.empty_like(x)

    distance = 1
    while distance < world_size and rank % (2 * distance) == 0:  # until this rank sends its sum
        if rank + distance < world_size:
            dist.recv(arrived, group=group, group_src=rank + distance)
            x += arrived
        distance *= 2

    if rank != 0:
        dist.send(x, group=group, group_dst=rank - distance)
        dist.recv(x, group=group, group_src=rank - distance)

    while distance > 1:
        distance //= 2
        if rank + distance < world_size:
            dist.send(x, group=group, group_dst=rank + distance)


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
    first = [-1] * world_size
    _hang(first, 0, world_size, -1)
    moved = [-1 if parent < 0 else (parent + 1) % world_size for parent in first]
    second = [moved[rank - 1] for rank in range(world_size)]  # rank 0 takes the last rank's place
    return first, second


def _hang(parents: list[int], start: int, end: int, parent: int) -> None:
    """Hang ranks ``start`` … ``end`` - 1 under ``parent``, with the even ranks as leaves."""
    if start < end:  # start is always even
        top = min((start + end) // 2 | 1, end - 1)  # odd, unless it is the only rank
        parents[top] = parent
        _hang(parents, start, top, top)
        _hang(parents, top + 1, end, top)


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
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    halves = x.view(-1).tensor_split(2)
    num_segments = max(1, ceil(len(halves[0]) / (segment_bytes // x.element_size())))
    places = [
        _Place.of(rank, parents, half.tensor_split(num_segments))
        for parents, half in zip(double_tree(world_size), halves, strict=True)
    ]
    num_steps = num_segments + max(place.height for place in places) - 1

    for step in range(num_steps):
        _pass_on([message for place in places for message in place.up(step)], group)
    for step in range(num_steps):
        _pass_on([message for place in places for message in place.down(step)], group)


class _Message(NamedTuple):
    """A segment that this rank sends or receives in a step."""

    call: Callable[..., dist.Work | None]  # dist.isend or dist.irecv
    peer: int
    tensor: Tensor
    partial_sum: Tensor | None = None  # sum to which the tensor is added on arrival


class _Place(NamedTuple):
    """This rank's place in a tree, and the half of ``x`` that travels through it."""

    parents: list[int]  # [parent], or [] for the root
    children: list[int]
    depth: int  # edges to the root
    height: int  # edges from the root of the whole tree to its deepest leaf
    segments: dict[int, Tensor]
    inboxes: list[Tensor]  # one for each child

    @classmethod
    def of(cls, rank: int, parents: list[int], segments: Sequence[Tensor]) -> "_Place":
        depths = [_depth(parents, each) for each in range(len(parents))]
        children = [child for child, parent in enumerate(parents) if parent == rank]
        return cls(
            parents=[parents[rank]] if depths[rank] else [],
            children=children,
            depth=depths[rank],
            height=max(depths),
            segments=dict(enumerate(segments)),
            inboxes=[torch.empty_like(segments[0]) for _ in children],  # no segment is longer
        )

    def up(self, step: int) -> Iterator[_Message]:
        """Yield a step's messages: a segment to the parent, and the next one from each child."""
        current = step - (self.height - self.depth)  # the deepest leaves begin
        if (segment := self.segments.get(current)) is not None:
            yield from (_Message(dist.isend, parent, segment) for parent in self.parents)
        if (segment := self.segments.get(current + 1)) is not None:
            for child, inbox in zip(self.children, self.inboxes, strict=True):
                yield _Message(dist.irecv, child, inbox[: len(segment)], segment)

    def down(self, step: int) -> Iterator[_Message]:
        """Yield a step's messages: a segment to each child, and the next one from the parent."""
        current = step - self.depth  # the root begins
        if (segment := self.segments.get(current)) is not None:
            yield from (_Message(dist.isend, child, segment) for child in self.children)
        if (segment := self.segments.get(current + 1)) is not None:
            yield from (_Message(dist.irecv, parent, segment) for parent in self.parents)


def _depth(parents: Sequence[int], rank: int) -> int:
    """Return the number of edges from ``rank`` to the root."""
    return 0 if parents[rank] < 0 else 1 + _depth(parents, parents[rank])


def _pass_on(messages: Sequence[_Message], group: Group) -> None:
    """Start all messages of a step together, wait for them, and add the sums that have arrived."""
    if not messages:
        return
    started = [
        dist.P2POp(message.call, message.tensor, group=group, group_peer=message.peer)
        for message in messages
    ]
    for work in dist.batch_isend_irecv(started):
        work.wait()
    for message in messages:
        if message.partial_sum is not None:
            message.partial_sum.add_(message.tensor)
