"""All-reduce, reduce-scatter and all-gather in shared memory: every rank sums its own chunk."""

import os
from collections.abc import Callable, Iterator, Sequence
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.shared_memory.meeting import (
    BAD_TENSOR,
    DTYPES,
    OPERATIONS,
    OTHER_GROUP,
    Call,
    Meeting,
)
from distlab.shared_memory.region import Group, check_host, map_region, world_ranks
from distlab.shared_memory.staging import SLOTS, Stage, block_bytes_for
from distlab.util.text import rank_names

CACHE_BYTES = 2**18  # bytes to sum at a time per tensor; those of all ranks fit into a core's cache
SMALL_BYTES = 2**16  # up to this size, every rank sums everything, which saves a meeting
TIMEOUT_S = 300.0

Chunks = Sequence[Tensor]
Step = Callable[[Chunks, int, int], None]  # (chunks, index of the piece, slot)


class SharedMemory:
    """Collectives of a group whose ranks share a host; all its ranks call each method together.

        shared = SharedMemory(inside)                   # only once, as it is slow
        gradients = shared.buffer(1000, torch.float32)
        shared.all_reduce(gradients)                    # nothing is copied in or out
        hierarchical_all_reduce(x, inside, across, reduce_scatter=shared.reduce_scatter,
                                all_gather=shared.all_gather)

    Every rank sums its own chunk of all ranks' tensors, block by block, and writes each block of
    the sum to all of them while it is still in the cache. Tensors that are not in a ``buffer`` pass
    through a staging area, piece by piece; a rank's own chunk is not copied in or out:
        step 0    copy in 0
        step 1    copy in 1    sum 0
        step 2    copy in 2    sum 1    copy out 0

    All ranks must make the same calls in the same order, from one thread at a time. ``x`` must be
    contiguous, on the CPU, and of the same shape and dtype on all ranks; if it is part of a buffer,
    it must be the same part on all ranks. Chunks are those of ``tensor_split``. Results are bit for
    bit the same on all ranks, and ``x`` may be overwritten as soon as a method returns.
    """

    def __init__(self, group: Group = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Map the staging area, which serves tensors of all sizes and dtypes.

        Args:
            group: Group of gloo ranks on one host; all ranks by default.
            timeout_s: Longest wait for a rank that is still running. A rank whose process has ended
                is noticed within about a tenth of a second.

        Raises:
            ValueError: The backend is not gloo, or there are several hosts; raised on all ranks.
            RuntimeError: The system refuses the memory; raised on all ranks.

        Cost: a few collectives, and 96 MiB for the staging area, which all ranks share.
        """
        check_host(group)
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._others = [(self._rank + i) % self._world_size for i in range(1, self._world_size)]
        self._meeting = Meeting(group, timeout_s)
        block_bytes = block_bytes_for(self._world_size)
        parts = self._map(SLOTS * self._world_size * block_bytes)
        self._stage = Stage(parts, block_bytes)
        self._buffers: list[list[Tensor]] = []

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a zero tensor in shared memory; collectives on it or its views copy nothing.

        Other ranks write to the tensor only during collectives on it.

        Raises:
            RuntimeError: The system refuses the memory, or the ranks' sizes differ; raised on all
                ranks.
        """
        parts = self._map(max(1, numel) * dtype.itemsize)
        self._buffers.append(parts)
        return parts[self._rank][: numel * dtype.itemsize].view(dtype)

    def all_reduce(self, x: Tensor, /, group: Group = None) -> None:
        """Sum ``x`` over the ranks, in place.

        Raises:
            ValueError: The ranks' calls differ, or the tensor or group of one rank is refused;
                raised on all ranks.
            RuntimeError: A rank has ended, has not arrived in time, or has given up.

        Cost: for tensors of n bytes, each rank reads and writes about 2n bytes of memory. The ranks
            meet once for a small tensor, twice for one in a buffer, and otherwise once more than
            there are pieces.
        """
        flat, call = self._begin("all_reduce", x, group)
        if self._world_size == 1:
            pass
        elif flat.nbytes <= SMALL_BYTES:
            self._run([self._put_all, self._sum_all], [flat], 1)
        elif call.buffer:
            self._sum_in_place(self._views(flat, call), is_shared=True)
        else:
            self._run_in_pieces([self._put_others, self._sum_mine, self._take_others], flat)
        self._meeting.finish()

    def reduce_scatter(self, x: Tensor, /, group: Group = None) -> Tensor:
        """Sum ``x`` over the ranks, and return this rank's chunk of the sum, a view of ``x``.

        The rest of ``x`` is undefined afterwards. Raises the same errors as ``all_reduce``.
        """
        flat, call = self._begin("reduce_scatter", x, group)
        if self._world_size == 1:
            pass
        elif call.buffer:
            self._sum_in_place(self._views(flat, call), is_shared=False)
        else:
            self._run_in_pieces([self._put_others, self._sum_mine], flat)
        self._meeting.finish()
        return flat.tensor_split(self._world_size)[self._rank]

    def all_gather(self, x: Tensor, /, group: Group = None) -> None:
        """Collect the chunks of all ranks in ``x``; rank r contributes chunk r.

        Raises the same errors as ``all_reduce``.
        """
        flat, call = self._begin("all_gather", x, group)
        if self._world_size == 1:
            pass
        elif call.buffer:
            self._give_in_place(self._views(flat, call))
        else:
            self._run_in_pieces([self._put_mine, self._take_others], flat)
        self._meeting.finish()

    # The beginning of a call

    def _begin(self, operation: str, x: Tensor, group: Group) -> tuple[Tensor, Call]:
        """Check this rank's call, and announce it or refuse it, so that no rank waits in vain."""
        if problem := self._other_group(group):
            self._meeting.refuse(OTHER_GROUP)
        elif problem := _problem(x):
            self._meeting.refuse(BAD_TENSOR)
        if problem:
            raise ValueError(f"[rank {dist.get_rank()}] SharedMemory.{operation}: {problem}")
        flat = x.detach().view(-1)
        call = Call(OPERATIONS.index(operation), len(flat), DTYPES.index(x.dtype), *self._where(x))
        self._meeting.begin(call)
        return flat, call

    def _other_group(self, group: Group) -> str:
        """Return what is wrong with a group, or ""."""
        if (group or dist.group.WORLD) is (self._group or dist.group.WORLD):
            return ""
        return (
            f"group has {rank_names(world_ranks(group))}, and this memory is shared by the group "
            f"of {rank_names(world_ranks(self._group))}: pass that one, or make a SharedMemory of "
            "the other"
        )

    def _where(self, x: Tensor) -> tuple[int, int]:
        """Return the number of ``x``'s buffer, from 1, and its offset in bytes; (0, 0) if none."""
        for number, parts in enumerate(self._buffers, start=1):
            offset = x.data_ptr() - parts[self._rank].data_ptr()
            if 0 <= offset < parts[self._rank].nbytes:
                return number, offset
        return 0, 0

    def _views(self, flat: Tensor, call: Call) -> list[Chunks]:
        """Return the chunks of each rank's tensor, by rank."""
        place = slice(call.offset_bytes, call.offset_bytes + flat.nbytes)
        tensors = [part[place].view(flat.dtype) for part in self._buffers[call.buffer - 1]]
        return [tensor.tensor_split(self._world_size) for tensor in tensors]

    def _map(self, part_bytes: int) -> list[Tensor]:
        region = map_region(part_bytes, self._group)
        os.close(region.file)  # the memory stays mapped
        return list(region.parts)

    # Collectives on tensors in a buffer

    def _sum_in_place(self, views: Sequence[Chunks], *, is_shared: bool) -> None:
        self._meeting.meet()
        self._meeting.check_same_call()
        for mine, *others in self._blocks_of_my_chunk(views):
            for other in others:
                mine.add_(other)
            for other in others if is_shared else ():
                other.copy_(mine)
        self._meeting.meet()

    def _give_in_place(self, views: Sequence[Chunks]) -> None:
        self._meeting.meet()
        self._meeting.check_same_call()
        for mine, *others in self._blocks_of_my_chunk(views):
            for other in others:
                other.copy_(mine)
        self._meeting.meet()

    def _blocks_of_my_chunk(self, views: Sequence[Chunks]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the matching blocks of all ranks' tensors in this rank's chunk, its own first."""
        return _in_cache(*(views[rank][self._rank] for rank in (self._rank, *self._others)))

    # Collectives through the staging area

    def _run_in_pieces(self, steps: Sequence[Step], flat: Tensor) -> None:
        chunks = flat.tensor_split(self._world_size)  # the first chunk is the longest
        self._run(steps, chunks, max(1, ceil(chunks[0].nbytes / self._stage.block_bytes)))

    def _run(self, steps: Sequence[Step], chunks: Chunks, pieces: int) -> None:
        """Run all steps on every piece, with one meeting between a step and the next.

        A slot is reused only after SLOTS meetings, when all ranks have read its contents. That is
        why no meeting has to follow the last step.
        """
        first, last = self._meeting.count, pieces + len(steps) - 2
        for now in range(last + 1):
            for lag, step in enumerate(steps):
                if 0 <= (piece := now - lag) < pieces:
                    step(chunks, piece, (first + piece) % SLOTS)
            if now < last:
                self._meeting.meet()
            if now == 0:
                self._meeting.check_same_call()

    def _put_others(self, chunks: Chunks, piece: int, slot: int) -> None:
        for rank in self._others:
            part = self._stage.part(chunks[rank], piece)
            self._stage.block(self._rank, slot, rank, part).copy_(part)

    def _sum_mine(self, chunks: Chunks, piece: int, slot: int) -> None:
        part = self._stage.part(chunks[self._rank], piece)
        result = self._stage.block(self._rank, slot, self._rank, part)
        others = [self._stage.block(rank, slot, self._rank, part) for rank in self._others]
        for mine, place, *rest in _in_cache(part, result, *others):
            for other in rest:
                mine.add_(other)
            place.copy_(mine)

    def _put_mine(self, chunks: Chunks, piece: int, slot: int) -> None:
        part = self._stage.part(chunks[self._rank], piece)
        self._stage.block(self._rank, slot, self._rank, part).copy_(part)

    def _take_others(self, chunks: Chunks, piece: int, slot: int) -> None:
        for rank in self._others:
            part = self._stage.part(chunks[rank], piece)
            part.copy_(self._stage.block(rank, slot, rank, part))

    def _put_all(self, chunks: Chunks, piece: int, slot: int) -> None:
        self._stage.whole(self._rank, slot, chunks[0]).copy_(chunks[0])

    def _sum_all(self, chunks: Chunks, piece: int, slot: int) -> None:
        x = chunks[0].copy_(self._stage.whole(0, slot, chunks[0]))
        for rank in range(1, self._world_size):
            x.add_(self._stage.whole(rank, slot, x))


def _in_cache(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching parts of equally long tensors, small enough to share a core's cache."""
    size = CACHE_BYTES // tensors[0].element_size()
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def _problem(x: Tensor) -> str:
    """Return what is wrong with a tensor, or ""."""
    if x.device.type != "cpu":
        return f"x is on {x.device}, and must be on the CPU"
    if not x.is_contiguous():
        return f"x must be contiguous, and has the strides {x.stride()} for {(*x.shape,)}"
    if x.dtype not in DTYPES:
        return f"x is of {x.dtype}, which cannot be summed here"
    return ""
