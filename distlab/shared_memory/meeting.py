"""A barrier for the ranks of a host: counters in shared memory, without messages."""

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
ARRIVED, BEGUN, FINISHED, CALLS = 0, 1, 2, 8  # words of a rank's part; other ranks poll ARRIVED
CALL_WORDS = 8  # words kept for a call: one cache line
# Number of yields, in about 20 µs, before a rank sleeps. On a busy machine, a rank that sleeps gets
# a core back sooner than one that yields.
YIELDS = 30
PAUSE_S = 50e-6  # time between checks of whether the awaited rank has arrived
LOOK_S = 0.05  # time between checks of whether the awaited rank still runs

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
    """A rank's call, as numbers that fit into words; all ranks must make the same call.

    Attributes:
        operation: Index in OPERATIONS, or a negative key of REFUSED if the rank refuses.
        numel: Number of elements.
        dtype: Index in DTYPES.
        buffer: Number of the registered buffer that holds the tensor, from 1; 0 if none does.
        offset_bytes: Offset of the tensor in that buffer.
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
    """Counts each rank's arrivals, and holds every rank until the others have arrived as often.

    Each rank has a part of shared memory, in 64-bit words:
        0           number of arrivals, or -1-r after it has given up waiting for rank r
        1, 2        number of calls begun, and finished
        8…, 16…     the last two calls, each a Call
    Only the rank itself writes there, one word at a time, which 64-bit processors do atomically.

    Every rank also locks a byte of the memory's file. The system unlocks the byte when the rank's
    process ends, so the others need not wait for a rank that has died.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        """Set up a meeting, on all ranks together; ``timeout_s`` limits each wait for a rank."""
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
        dist.barrier(group)  # from now on, an unlocked byte means that its rank has ended

    def begin(self, call: Call) -> None:
        """Announce this rank's call, to be compared with the others' after the first meeting.

        Raises:
            RuntimeError: This rank gave up in an earlier call.
        """
        if self._mine[ARRIVED] < 0:
            raise RuntimeError(f"{self._me} has given up before: make a new SharedMemory")
        # Leave the previous call in place, since others may still be reading it.
        start = CALLS + self._mine[BEGUN] % 2 * CALL_WORDS
        for word, number in enumerate(call, start):
            self._mine[word] = number
        self._mine[BEGUN] += 1

    def refuse(self, what: int) -> None:
        """Announce, without waiting, that this rank refuses the call that the others make.

        Args:
            what: Key of REFUSED.
        """
        self.begin(Call(what))
        self._come()
        self.finish()

    def finish(self) -> None:
        """Announce that this rank has finished its call."""
        self._mine[FINISHED] = self._mine[BEGUN]

    def meet(self) -> None:
        """Wait until every rank has arrived as many times as this one.

        Afterwards, every rank sees what the others wrote before they arrived.

        Raises:
            RuntimeError: A rank has ended, has given up, or does not arrive in time.
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
        """Keep reads and writes before this call from moving after it, and vice versa.

        x86 processors keep this order by themselves; others, such as arm64, keep it if a lock is
        acquired and released twice.
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
        """Give up if ``peer`` will not arrive, or if another rank has given up."""
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
        """Return True if the process of ``peer`` still holds its lock."""
        try:
            fcntl.lockf(self._region.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return True
        fcntl.lockf(self._region.file, fcntl.LOCK_UN, 1, peer)
        return False

    def _give_up(self, peer: int, why: str) -> None:
        """Inform the ranks that wait for this one, and raise RuntimeError."""
        self._mine[ARRIVED] = -1 - peer
        raise RuntimeError(
            f"{self._me}: waited in {self._doing(self._rank)}, but rank {self._ranks[peer]} {why}; "
            f"{self._doing(peer)} was its last. Do all ranks make the same calls?"
        )

    def _doing(self, peer: int) -> str:
        """Return a text such as ``call 4 (all_reduce of 25 elements of float32, finished)``."""
        if not (begun := self._words[peer][BEGUN]):
            return "no call"
        state = ", finished" if self._words[peer][FINISHED] == begun else ""
        return f"call {begun} ({self._call_of(peer, begun)}{state})"

    def _call_of(self, peer: int, number: int) -> Call:
        start = CALLS + (number - 1) % 2 * CALL_WORDS
        return Call(*self._words[peer][start : start + len(Call._fields)])

    def check_same_call(self) -> None:
        """Check, after the first meeting of a call, that all ranks have made the same call.

        Raises:
            ValueError: The calls differ; raised on all ranks.
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
