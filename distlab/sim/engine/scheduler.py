"""Who runs: ranks are threads, and exactly one runs at a time, the one whose clock is earliest.

A rank computes as far ahead as it likes. Before it does something that others can notice, it calls
``act`` and waits until no rank is earlier. So everything that ranks do to each other happens in the
order of the virtual clock, ties by rank, and what a program does never depends on the machine.

    rank 0   ── compute ──┐act  send          block · · · · ·  ready ── compute
    rank 1   ── compute ─────────────┐act  recv  block · · · ·  ready ──
    events                                          the message arrives

There is no thread for the scheduler: the rank that stops picks the next one and hands over the
baton. When no rank is ready and no event is pending, the world is known to be deadlocked.
"""

import heapq
import threading
from collections.abc import Callable
from itertools import count
from typing import NoReturn, Protocol

NEVER = float("inf")
MAX_UNWOUND = 100  # calls of a rank that ends: `finally` makes a few, `while` with `except` goes on
STACK_BYTES = 512 * 1024  # the default of 8 MiB would be 8 GiB of addresses for 1,024 ranks


class Stopped(BaseException):
    """Raised inside a rank whose world has ended, to unwind it. Programs should not catch it."""


class Killed(BaseException):
    """Raised inside a rank that a fault has killed."""


class EventSource(Protocol):
    """Something other than timers that makes things happen at a virtual time: the network."""

    def next_event_s(self) -> float:
        """When the next one happens; NEVER if none is pending."""

    def run_events(self, now_s: float) -> None:
        """Do what happens at ``now_s``."""


class Rank:
    """One simulated rank: a thread, its clock and its baton."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock_s = 0.0
        self.has_ended = False
        self.is_killed = False
        self.num_calls = 0  # of torch.distributed
        self.last_call: object = None  # the operation
        self.num_clock_reads = 0  # since its last communication call
        self.last_reading_s = -1.0  # of its clock
        self.num_unwound = 0  # how often it was told to end
        self.is_parked = False
        self.waits_in: object = None  # the operation that blocks it
        self.baton = threading.Lock()
        self.baton.acquire()

    def __repr__(self) -> str:
        return f"rank {self.number} at {self.clock_s:.9f} s"


class Scheduler:
    """Runs the ranks of one world in the order of their clocks."""

    def __init__(self, num_ranks: int, on_switch: Callable[[Rank, Rank], None]) -> None:
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.current = self.ranks[0]
        self.now_s = 0.0  # no event and no act lies before this
        self.source: EventSource | None = None
        self.is_stopping = False
        self._on_switch = on_switch  # (from, to): swap what is the rank's own
        self._ready = [(0.0, number) for number in range(num_ranks)]
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._all_ended = threading.Lock()
        self._on_deadlock: Callable[[], BaseException] | None = None
        self.failure: BaseException | None = None

    def run(self, body: Callable[[Rank], None], on_deadlock: Callable[[], BaseException]) -> None:
        """Run ``body`` as every rank; return when all have ended, raise what ended the world.

        Args:
            body: what a rank does; called in that rank's thread.
            on_deadlock: makes the error to raise when no rank can go on.
        """
        self._on_deadlock = on_deadlock
        self._all_ended.acquire()
        threads = self._start(body)
        _, first = heapq.heappop(self._ready)
        self.current = self.ranks[first]
        self.current.baton.release()
        self._all_ended.acquire()
        for rank, thread in zip(self.ranks, threads, strict=True):
            if not rank.is_parked:
                thread.join()
        if self.failure:
            raise self.failure

    def _start(self, body: Callable[[Rank], None]) -> list[threading.Thread]:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threads = [
                threading.Thread(
                    target=self._be_rank, args=(rank, body), name=f"rank {rank.number}", daemon=True
                )
                for rank in self.ranks
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(usual)
        return threads

    def _be_rank(self, rank: Rank, body: Callable[[Rank], None]) -> None:
        rank.baton.acquire()
        try:
            if not self.is_stopping:
                body(rank)
        except (Stopped, Killed):
            pass
        except BaseException as error:
            rank.has_ended = True
            self.stop(error)
        rank.has_ended = True
        self._hand_over(rank)

    # What a rank does

    def act(self) -> None:
        """Wait until the running rank is the earliest of all, so that it may be noticed."""
        rank = self.current
        while rank.clock_s > self.now_s and not rank.is_killed:
            if not self._someone_is_earlier(rank):
                self.now_s = rank.clock_s
                break
            heapq.heappush(self._ready, (rank.clock_s, rank.number))
            self._yield(rank)
        if self.is_stopping or rank.is_killed:
            self._unwind()

    def block(self, operation: object) -> None:
        """Wait until ``ready`` is called for the running rank."""
        rank = self.current
        if self.is_stopping or rank.is_killed:
            self._unwind()
        rank.waits_in = operation
        self._yield(rank)

    def ready(self, rank: Rank, at_s: float) -> None:
        """Let a rank go on at ``at_s`` or later, if it is blocked."""
        if rank.waits_in is None:
            return
        rank.waits_in = None
        if at_s > rank.clock_s:
            rank.clock_s = at_s
        heapq.heappush(self._ready, (rank.clock_s, rank.number))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call ``action`` when the virtual time is ``time_s``."""
        heapq.heappush(self._timers, (time_s, next(self._order), action))

    def kill(self, rank: Rank) -> None:
        """Let a rank end where it is, without notifying the others."""
        if not rank.has_ended:
            rank.is_killed = True
            self.ready(rank, self.now_s)

    def stop(self, failure: BaseException) -> None:
        """End the world: every other rank is unwound where it is."""
        self.failure = self.failure or failure
        if not self.is_stopping:
            self.is_stopping = True
            self.now_s = NEVER  # no rank has to wait any more
            for rank in self.ranks:
                rank.waits_in = None
            self._ready = [(0.0, rank.number) for rank in self.ranks if not rank.has_ended]

    # Handing over

    def _someone_is_earlier(self, rank: Rank) -> bool:
        if self._ready and self._ready[0] < (rank.clock_s, rank.number):
            return True
        return self._next_event_s() <= rank.clock_s

    def _next_event_s(self) -> float:
        timer_s = self._timers[0][0] if self._timers else NEVER
        source_s = self.source.next_event_s() if self.source else NEVER
        return timer_s if timer_s < source_s else source_s

    def _yield(self, rank: Rank) -> None:
        next_rank = self._next()
        if next_rank is not None and next_rank is not rank:
            self._switch(rank, next_rank)
            rank.baton.acquire()
        if self.is_stopping or rank.is_killed:
            self._unwind()

    def _unwind(self) -> NoReturn:
        self.current.num_unwound += 1
        if self.current.num_unwound > MAX_UNWOUND:
            self._park(self.current)
        raise Stopped if self.is_stopping else Killed

    def _park(self, rank: Rank) -> NoReturn:
        """Never again run a rank that catches everything and keeps calling."""
        rank.has_ended = rank.is_parked = True
        self._hand_over(rank)
        while True:
            rank.baton.acquire()

    def _hand_over(self, rank: Rank) -> None:
        """Pass the baton on for the last time."""
        next_rank = self._next()
        if next_rank is None:
            self._all_ended.release()
        else:
            self._switch(rank, next_rank)

    def _switch(self, rank: Rank, next_rank: Rank) -> None:
        self._on_switch(rank, next_rank)
        self.current = next_rank
        next_rank.baton.release()

    def _next(self) -> Rank | None:
        """Let events happen until a rank is the earliest, and return it; None if all have ended."""
        while True:
            event_s = NEVER if self.is_stopping else self._next_event_s()
            if self._ready and self._ready[0][0] < event_s:
                clock_s, number = heapq.heappop(self._ready)
                self.now_s = max(self.now_s, clock_s)
                return self.ranks[number]
            if event_s < NEVER:
                self._run_events(event_s)
            elif all(rank.has_ended for rank in self.ranks):
                return None
            else:
                self._stop_deadlock()

    def _run_events(self, now_s: float) -> None:
        """Do what happens now; what it raises ends the world, and is not the waiting rank's."""
        self.now_s = now_s
        try:
            while self._timers and self._timers[0][0] <= now_s:
                heapq.heappop(self._timers)[2]()
            if self.source and self.source.next_event_s() <= now_s:
                self.source.run_events(now_s)
        except BaseException as error:
            self.stop(error)

    def _stop_deadlock(self) -> None:
        if self._on_deadlock is None:
            raise RuntimeError("the scheduler is not running")
        try:
            self.stop(self._on_deadlock())
        except Exception as error:  # otherwise no rank would hand over the baton
            self.stop(error)
