"""Where the ranks of a host wait for each other: counters in shared memory, no messages."""

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from distlab.shared_memory.region import Group, map_region, world_ranks
from distlab.util.text import counted, rank_names

WORD_BYTES = 8
ARRIVED, BEGUN, FINISHED, CALLS = 0, 1, 2, 8  # words of a rank's part; ARRIVED is polled by others
CALL_WORDS = 8  # a cache line
YIELDS = 30  # some 20 µs; on a busy machine, sleepers get a core back sooner than who yields
PAUSE_S = 50e-6  # between looks at whether the awaited rank has come
LOOK_S = 0.05  # between looks at whether the awaited rank still runs

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.complex64, torch.complex128)

BAD_TENSOR, OTHER_GROUP = -1, -2
REFUSED = {
    BAD_TENSOR: "a tensor that it has refused",
    OTHER_GROUP: "another group, which it has refused",
}


class Call(NamedTuple):
    """What a rank has called, in numbers that fit into words; all ranks must have called the same.

    Attributes:
        operation: position in OPERATIONS; below 0: what its rank has refused, REFUSED.
        numel: number of elements.
        dtype: position in DTYPES.
        buffer: Number of the registered buffer that holds the tensor, from 1; 0: none.
        offset_bytes: Place of the tensor in that buffer.
    """

    operation: int
    numel: int = 0
    dtype: int = 0
    buffer: int = 0
    offset_bytes: int = 0

    def __str__(self) -> str:
        if self.operation < 0:
            return REFUSED[self.operation]
        dtype = str(DTYPES[self.dtype]).removeprefix("torch.")
        text = f"{OPERATIONS[self.operation]} of {counted(self.numel, 'element')} of {dtype}"
        if self.buffer:
            text += f" at byte {self.offset_bytes:,} of buffer {self.buffer}"
        return text


class Meeting:
    """Counts how often each rank has come, and lets nobody go on before all have.

    A part of shared memory for each rank, in words of 64 bits:
        0           how often it has come; below 0: -1-r after it has given up waiting for rank r
        1, 2        calls that it has begun, and finished
        8…, 16…     what it has called last, and before: Call
    Only the rank itself writes there, a word at a time, which all processors of 64 bits do at once.

    Every rank also locks a byte of the memory's file, which the system unlocks when the process
    ends, so that the others need not wait for a rank that has died.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        """Make it together; ``timeout_s`` bounds how long a rank waits for another."""
        self._rank, self._ranks = dist.get_rank(group), world_ranks(group)
        self._timeout_s = timeout_s
        self._region = map_region((CALLS + 2 * CALL_WORDS) * WORD_BYTES, group)
        self._words = [part.numpy().data.cast("q") for part in self._region.parts]
        self._mine = self._words[self._rank]
        self._others = [peer for peer in range(len(self._ranks)) if peer != self._rank]
        self._fence = threading.Lock()
        self.count = 0
        weakref.finalize(self, os.close, self._region.file)
        fcntl.lockf(self._region.file, fcntl.LOCK_EX, 1, self._rank)
        dist.barrier(group)  # after this, a byte without a lock is a rank that has ended

    def begin(self, call: Call) -> None:
        """Say what this rank calls; the first meeting of a call compares it with the others'.

        Raises:
            RuntimeError: it has given up before.
        """
        if self._mine[ARRIVED] < 0:
            raise RuntimeError(f"{self._me} has given up before: make a new SharedMemory")
        start = CALLS + self._mine[BEGUN] % 2 * CALL_WORDS  # the others may still read the last one
        for word, number in enumerate(call, start):
            self._mine[word] = number
        self._mine[BEGUN] += 1

    def refuse(self, what: int) -> None:
        """Say that this rank refuses the call that the others make, and wait for nobody.

        Args:
            what: Key of REFUSED.
        """
        self.begin(Call(what))
        self._come()
        self.finish()

    def finish(self) -> None:
        """Say that the call is over."""
        self._mine[FINISHED] = self._mine[BEGUN]

    def meet(self) -> None:
        """Return when all ranks have come as often as this one.

        What a rank has written before it comes, all others see afterwards.

        Raises:
            RuntimeError: a rank has ended, has given up, or does not come in time.
        """
        self._come()
        for peer in self._others:
            if self._words[peer][ARRIVED] < self.count:
                self._await(peer)
        self._order_memory()

    def _come(self) -> None:
        self.count += 1
        self._order_memory()
        self._mine[ARRIVED] = self.count

    def _order_memory(self) -> None:
        """Keep what is read and written before this call before what is read and written after it.

        x86 does so by itself; on others (arm64), a lock that is taken and given back, twice, does.
        """
        for _ in range(2):
            with self._fence:
                pass

    def _await(self, peer: int) -> None:
        words, yields = self._words[peer], YIELDS
        start_s = look_s = time.perf_counter()
        while 0 <= words[ARRIVED] < self.count:
            if yields:
                yields -= 1
                os.sched_yield()  # several ranks may share a core
                continue
            time.sleep(PAUSE_S)
            if (now_s := time.perf_counter()) - look_s > LOOK_S:
                look_s = now_s
                self._look_around(peer, now_s - start_s)
        self._check_goes_on(peer)

    def _look_around(self, peer: int, waited_s: float) -> None:
        """Give up if ``peer`` will not come, or somebody else has given up."""
        for other in self._others:
            self._check_goes_on(other)
        if not self._runs(peer) and 0 <= self._words[peer][ARRIVED] < self.count:
            self._give_up(peer, "has ended")
        if waited_s > self._timeout_s:
            self._give_up(peer, f"has not come within {self._timeout_s:g} s")

    def _check_goes_on(self, peer: int) -> None:
        if (arrived := self._words[peer][ARRIVED]) < 0:
            self._give_up(peer, f"has given up waiting for rank {self._ranks[-1 - arrived]}")

    def _runs(self, peer: int) -> bool:
        """Tell whether the process of ``peer`` still holds its lock."""
        try:
            fcntl.lockf(self._region.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return True
        fcntl.lockf(self._region.file, fcntl.LOCK_UN, 1, peer)
        return False

    def _give_up(self, peer: int, why: str) -> None:
        """Let those who wait for this rank know, and raise."""
        self._mine[ARRIVED] = -1 - peer
        raise RuntimeError(
            f"{self._me}: waited in {self._doing(self._rank)}, but rank {self._ranks[peer]} {why}; "
            f"{self._doing(peer)} was its last. Do all ranks make the same calls?"
        )

    def _doing(self, peer: int) -> str:
        """Write ``call 4 (all_reduce of 25 elements of float32, finished)``."""
        if not (begun := self._words[peer][BEGUN]):
            return "no call"
        state = ", finished" if self._words[peer][FINISHED] == begun else ""
        return f"call {begun} ({self._call_of(peer, begun)}{state})"

    def _call_of(self, peer: int, number: int) -> Call:
        start = CALLS + (number - 1) % 2 * CALL_WORDS
        return Call(*self._words[peer][start : start + len(Call._fields)])

    def check_same_call(self) -> None:
        """After the first meeting of a call: compare what all ranks have called.

        Raises:
            ValueError: on all ranks, if they differ.
        """
        number = self._mine[BEGUN]
        calls = [self._call_of(peer, number) for peer in range(len(self._ranks))]
        if len({*calls}) > 1:
            self.finish()
            raise ValueError(f"{self._me}: call {number} differs: {self._listed(calls)}")

    def _listed(self, calls: Sequence[Call]) -> str:
        by_call: dict[Call, list[int]] = {}
        for rank, call in zip(self._ranks, calls, strict=True):
            by_call.setdefault(call, []).append(rank)
        return "; ".join(f"{rank_names(ranks)}: {call}" for call, ranks in by_call.items())

    @property
    def _me(self) -> str:
        return f"[rank {self._ranks[self._rank]}] SharedMemory of {rank_names(self._ranks)}"
