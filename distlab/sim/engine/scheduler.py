"""Ranks are threads, and exactly one runs at a time: the one whose clock is earliest.

A rank computes as far ahead as it likes. Before it does something that other ranks can notice, it
calls ``act`` and waits until no rank is earlier. Ranks therefore affect each other in the order of
virtual time, with ties broken by rank, and a program's behaviour never depends on the machine.

    rank 0   ── compute ──┐act  send          block · · · · ·  ready ── compute
    rank 1   ── compute ─────────────┐act  recv  block · · · ·  ready ──
    events                                          the message arrives

The scheduler has no thread of its own: a rank that stops picks the next one and hands it the baton.
When no rank is ready and no event is pending, the world is deadlocked.

A rank may start threads. Each thread is a strand, with its own clock and baton; the rank itself is
its first strand. Across all ranks, exactly one strand runs at a time, so everything said here about
ranks is true of strands.
"""

import contextlib
import ctypes
import heapq
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, Protocol

from distlab.sim.engine.patience import MAX_POLLS, Operation, Patience

NEVER = float("inf")
# Limit on the calls of a rank that is being ended. A `finally` makes a few; a loop that catches
# every exception would go on forever.
MAX_UNWOUND = 100
INTERRUPT_S = 0.01  # real seconds between two attempts to interrupt a rank
MAX_INTERRUPTS = 500  # attempts; a rank may be in C code
SIMULATOR = f"{Path(__file__).parents[1]}{os.sep}"
_PATHS = sysconfig.get_paths()
LIBRARIES = (
    "<frozen ",
    *(f"{_PATHS[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{Path(os.__file__).parent}{os.sep}",
)
STACK_BYTES = 512 * 1024  # the default of 8 MiB would take 8 GiB of addresses for 1,024 ranks


class Stopped(BaseException):
    """Raised inside a rank whose world has ended, to unwind it. Programs should not catch it."""


class Killed(BaseException):
    """Raised inside a rank that a fault has killed."""


def _is_library(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, such as torch."""
    return file.startswith(LIBRARIES) and not file.startswith(SIMULATOR)


def interrupt(thread: int) -> None:
    """Raise Stopped in a thread, unless the simulator, or a library for it, is running there.

    Raised between two lines of the scheduler, it would leave the scheduler in disorder. Code
    that calls the simulator is stopped by the scheduler itself.
    """
    frame = sys._current_frames().get(thread)
    while frame and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None and not frame.f_code.co_filename.startswith(SIMULATOR):
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread), ctypes.py_object(Stopped))


class EventSource(Protocol):
    """A source of events besides the timers; in practice, the network.

    Attributes:
        next_event_s: Time of the next event, or NEVER. Read at every hand-over.
    """

    next_event_s: float

    def run_events(self, now_s: float) -> None:
        """Run the events that are due at ``now_s``."""


_new_baton = threading.Lock  # the real lock; while a world runs, ranks get virtual ones
_new_event = threading.Event
_new_queue: Callable[[], SimpleQueue[Callable[[], None] | None]] = SimpleQueue


def _nothing() -> None:
    pass


class Timer:
    """An action due at a virtual time; ``action`` is None once the timer is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action


class Worker:
    """A thread of the operating system that runs one function after another.

    A rank keeps its worker between the runs of a world, and so everything that Python and torch
    store per thread, such as its current GPU.
    """

    def __init__(self, name: str) -> None:
        self._functions = _new_queue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self.ident = self._thread.ident or 0

    def _work(self) -> None:
        me: Any = threading.current_thread()
        me._daemonic = False  # so that threads started by the rank are not daemons by default
        function: Callable[[], None] | None = _nothing
        while function:
            with contextlib.suppress(Stopped):  # one that came too late to interrupt a function
                function = _nothing  # the last one refers to the program's objects
                function = self._functions.get()
                function and function()

    def begin(self, function: Callable[[], None]) -> None:
        """Run a function once those before it have ended."""
        self._functions.put(function)

    def settle(self) -> None:
        """Let the thread raise an exception that is still due."""
        is_settled = _new_event()
        while not is_settled.is_set():
            self.begin(is_settled.set)
            is_settled.wait(INTERRUPT_S)

    def end(self) -> None:
        """End the thread after its last function."""
        self._functions.put(None)
        self._thread.join()


class Strand:
    """A thread of a rank, its clock and its baton.

    Attributes:
        rank: Rank that owns the thread.
        order: Number of the thread on its rank; 0 for the rank itself.
        name: Name of the thread, or "" for the first one.
        clock_s: Virtual time of the strand.
        ident: Identifier of the thread.
        waits_in: Operation that blocks it, or None.
        doing: Reason why it waits, for reports, such as ``waits in .item()``; "" for a plain wait.
        is_late: True if its latest wait has timed out.
        patience: Polls and sleeps since it last worked.
        last_reading_s: Latest reading of its clock.
        num_unwound: Number of its calls that raised Stopped or Killed.
        is_daemon: True if it ends with its rank.
        waiting: Strands that wait for this one to end.
    """

    rank: "Rank"
    number: int

    def __init__(
        self, order: int, clock_s: float, name: str = "", *, is_daemon: bool = False
    ) -> None:
        self.order, self.name = order, name
        self.clock_s = clock_s
        self.ident = 0
        self.has_ended = self.is_killed = self.is_parked = False
        self.last_reading_s = -1.0
        self.num_unwound = 0
        self.waits_in: object = None
        self.doing = ""
        self.is_late = False
        self.patience = Patience(clock_s)
        self.is_daemon = is_daemon
        self.waiting: deque[Strand] = deque()
        self.baton = _new_baton()
        self.baton.acquire()

    def __repr__(self) -> str:
        thread = f", thread {self.order}," if self.order else ""
        return f"rank {self.number}{thread} at {self.clock_s:.9f} s"


class Rank(Strand):
    """One simulated rank: its first thread, and the data that its threads share.

    Attributes:
        strands: All its threads, the first one being the rank itself.
        num_calls: Number of torch.distributed calls that it has made.
        last_call: Operation of the latest call.
    """

    def __init__(self, number: int) -> None:
        super().__init__(0, 0.0)
        self.rank, self.number = self, number
        self.strands: list[Strand] = [self]
        self.num_calls = 0
        self.last_call: object = None
        self.worker: Worker | None = None

    def renew(self, clock_s: float) -> None:
        """Become ready for another run; a thread that will never end is left behind."""
        self.clock_s, self.strands = clock_s, [self]
        self.has_ended = self.is_killed = False
        self.num_unwound, self.waits_in, self.doing = 0, None, ""
        self.patience, self.waiting = Patience(clock_s), deque()
        if self.is_parked:
            self.is_parked, self.worker = False, None
            self.baton = _new_baton()
            self.baton.acquire()

    @property
    def has_left(self) -> bool:
        """True once all threads of the rank have ended."""
        return all(strand.has_ended for strand in self.strands)


class CutShort(NamedTuple):
    """A rank's wait for an operation that had not ended at the end of a run."""

    rank: int
    operation: Any
    since_s: float


class Scheduler:
    """Runs the ranks of one world in the order of their clocks.

    Attributes:
        cut_short: Waits that an error has ended in this run, of the first thread of each rank.
    """

    def __init__(self, num_ranks: int, on_switch: Callable[[Strand, Strand], None]) -> None:
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.current: Strand = self.ranks[0]
        self.now_s = 0.0  # time of the latest event or `act`
        self._stopped_s = 0.0  # that time when the run was stopped
        self.source: EventSource | None = None
        self.is_stopping = False
        self.cut_short: list[CutShort] = []
        # Returns the operation to report for a strand that only sleeps.
        self.describe_rest: Callable[[Strand], object] = repr
        # Called for each daemon thread that is killed because its rank has ended.
        self.on_abandoned: Callable[[Strand], None] = lambda _: None
        self._on_switch = on_switch  # called with (from, to), to swap the ranks' process state
        self._ready = [(0.0, number, 0) for number in range(num_ranks)]  # (clock, rank, strand)
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._all_ended = threading.Lock()
        self._on_deadlock: Callable[[], BaseException] | None = None
        self.failure: BaseException | None = None
        self.is_awaiting = False  # while the caller of `run` waits, and a signal may interrupt it
        self.is_interrupted = False  # True if a signal came at another time
        self.is_lost = False  # True once a rank could not be interrupted
        self.interrupted_by: BaseException | None = None  # set while the run is being interrupted
        # Returns the error for a run that is interrupted while a strand runs.
        self.describe_interrupt: Callable[[Strand], BaseException] = lambda _: KeyboardInterrupt()

    def run(self, body: Callable[[Rank], None], on_deadlock: Callable[[], BaseException]) -> None:
        """Run ``body`` on the ready ranks until all have ended; raise the error that ended the run.

        Args:
            body: Function called for each rank, in that rank's thread.
            on_deadlock: Function that returns the error to raise when no rank can continue.
        """
        self._on_deadlock = on_deadlock
        self._all_ended.acquire()
        self._start(body)
        _, first, _ = heapq.heappop(self._ready)
        self.current = self.ranks[first]
        self.current.baton.release()
        self._await_end()
        if failure := self.failure or self.interrupted_by:
            raise failure

    def _start(self, body: Callable[[Rank], None]) -> None:
        usual = threading.stack_size(STACK_BYTES)
        try:
            for _, number, _ in self._ready:
                rank = self.ranks[number]
                rank.worker = rank.worker or Worker(f"rank {number}")
                rank.ident = rank.worker.ident
        finally:
            threading.stack_size(usual)
        for _, number, _ in self._ready:
            rank = self.ranks[number]
            if rank.worker:
                rank.worker.begin(partial(self.be, rank, partial(body, rank)))

    def _await_end(self) -> None:
        """Wait until all strands have ended; if the user interrupts that, make them end."""
        while True:
            try:
                return self._make_end() if self.interrupted_by else self._await_all()
            except KeyboardInterrupt:
                self.interrupted_by = self.interrupted_by or self.describe_interrupt(self.current)

    def _await_all(self) -> None:
        self.is_awaiting = True
        try:
            if self.is_interrupted:
                raise KeyboardInterrupt
            with self._all_ended:
                pass
        finally:
            self.is_awaiting = False

    def _make_end(self) -> None:
        """Interrupt the ranks until they end; give up on one that neither returns nor calls."""
        for _ in range(MAX_INTERRUPTS):
            if self._all_ended.acquire(timeout=INTERRUPT_S):
                self._all_ended.release()
                for worker in self._workers():
                    worker.settle()
                return
            interrupt(self.current.ident)
        self.is_lost = True
        self._on_switch = lambda *_: None  # the process is no longer the ranks'

    def _workers(self) -> Iterator[Worker]:
        """Yield the ranks' threads, but for those that will never end."""
        for rank in self.ranks:
            if rank.worker and not rank.is_parked:
                yield rank.worker

    def first(self) -> int:
        """Return the number of the rank that will begin the next run."""
        return self._ready[0][1]

    def renew(self, ranks: Collection[int]) -> None:
        """Make ranks ready for another run, which begins at the latest of all ranks' times."""
        now_s = self.latest_s()
        for rank in self.ranks:
            rank.renew(now_s)
        self.now_s, self.is_stopping, self.failure = now_s, False, None
        self.interrupted_by, self.is_interrupted = None, False
        self.cut_short = []
        for rank in self.ranks:
            rank.has_ended = rank.number not in ranks
        self._ready = [(now_s, number, 0) for number in sorted(ranks)]

    def latest_s(self) -> float:
        """Return the latest time of all ranks and events."""
        ended_s = self._stopped_s if self.is_stopping else self.now_s
        return max(ended_s, *(rank.clock_s for rank in self.ranks))

    def drain(self) -> None:
        """Run the events that are left after a run was stopped."""
        self.now_s, self.is_stopping = self.latest_s(), False
        while (event_s := self._next_event_s()) < NEVER:
            self._run_events(max(event_s, self.now_s))

    def close(self) -> None:
        """End the ranks' threads."""
        if not self.is_lost:
            for worker in self._workers():
                worker.end()

    def spawn(self, name: str, *, is_daemon: bool) -> Strand:
        """Return a new strand of the running rank; the strand's thread must call ``be``."""
        rank = self.current.rank
        strand = Strand(len(rank.strands), self.current.clock_s, name, is_daemon=is_daemon)
        strand.rank, strand.number = rank, rank.number
        rank.strands.append(strand)
        heapq.heappush(self._ready, (strand.clock_s, strand.number, strand.order))
        return strand

    def be(self, strand: Strand, body: Callable[[], None]) -> None:
        """Run ``body`` as ``strand`` when the strand's turn comes; an error ends the world."""
        strand.baton.acquire()
        try:
            if not self.is_stopping and not strand.is_killed:
                body()
        except (Stopped, Killed):
            pass
        except BaseException as error:
            strand.has_ended = True
            self.stop(error)
        strand.has_ended = True
        if self.interrupted_by:
            self.stop(self.interrupted_by)
        for other in strand.waiting:
            self.ready(other, strand.clock_s)
        if strand is strand.rank:
            for other in strand.rank.strands:
                if other.is_daemon and not other.has_ended:
                    self.on_abandoned(other)
                    self._kill(other)
        self._hand_over(strand)

    # Calls made by the running rank
    #
    # The invariant: while a rank does something that others can notice, `now_s` is its time, no
    # other strand is ready at an earlier time, and no earlier event is pending. `act` ensures this:
    # it queues the rank as ready and hands over until nothing is earlier. So nothing can change a
    # rank's past, and identical programs have identical histories. Between two calls of `act`, a
    # rank's clock may run ahead of `now_s`: the rank computes, which no other rank sees.

    def act(self) -> None:
        """Wait until the running rank is the earliest of all, and may therefore affect others."""
        rank = self.current
        while rank.clock_s > self.now_s and not rank.is_killed:
            if not self._someone_is_earlier(rank):
                self.now_s = rank.clock_s
                break
            heapq.heappush(self._ready, (rank.clock_s, rank.number, rank.order))
            self._yield(rank)
        if self.is_stopping or rank.is_killed or self.interrupted_by:
            self._unwind()

    def block(self, operation: object, until_s: float = NEVER) -> bool:
        """Wait until ``ready`` is called for the running rank; return whether that was in time."""
        rank = self.current
        if self.is_stopping or rank.is_killed or self.interrupted_by:
            self._unwind()
        rank.waits_in, rank.is_late, patience = operation, False, rank.patience
        if until_s == NEVER:
            patience.blocks()
            self._yield(rank)
            patience.wakes(rank.clock_s)
            return True
        patience.waits()
        timer = self.at(max(until_s, self.now_s), partial(self._give_up, rank, operation))
        try:
            self._yield(rank)
        finally:
            timer.action = None
        if not rank.is_late:
            patience.tried = None
        return not rank.is_late

    def _give_up(self, rank: Strand, operation: object) -> None:
        if rank.waits_in is operation:
            rank.is_late = True
            self.ready(rank, self.now_s)

    def poll(self, operation: Operation, max_polls: int = MAX_POLLS) -> None:
        """Like ``act``, but for a rank that polls an operation.

        Args:
            operation: Function that returns the polled operation.
            max_polls: Number of unsuccessful polls after which the rank counts as waiting.
        """
        rank = self.current
        if rank.patience.polls(operation, max_polls):
            self._stop_if_in_vain(rank)
        self.act()

    def rest(self, operation: Operation | None = None) -> None:
        """Like ``act``, but for a rank that has slept.

        Args:
            operation: Function that returns the operation whose wait has timed out, or None.
        """
        rank, patience = self.current, self.current.patience
        if patience.rests(operation, partial(self.describe_rest, rank), rank.clock_s):
            if patience.is_over(rank.clock_s):
                self._stop_if_in_vain(rank)
            elif self._all_poll():
                rank.clock_s += patience.stretch_s(rank.clock_s)
        self.act()

    def _stop_if_in_vain(self, rank: Strand) -> None:
        if not self._all_poll():
            return
        for strand in self._strands():
            asks = strand.patience.asks
            if asks is not None and strand.waits_in is None and not strand.has_ended:
                strand.waits_in = asks()
        self._stop_deadlock()
        self._yield(rank)

    def _all_poll(self) -> bool:
        """Return True if every rank polls or waits, and no event is pending."""
        waiting = (self.ranks[number].strands[order] for _, number, order in self._ready)
        return self._next_event_s() == NEVER and all(strand.patience.asks for strand in waiting)

    def ready(self, rank: Strand, at_s: float) -> None:
        """Let a strand continue at ``at_s`` or later, if it is blocked."""
        if rank.waits_in is None:
            return
        rank.waits_in = None
        if at_s > rank.clock_s:
            rank.clock_s = at_s
        heapq.heappush(self._ready, (rank.clock_s, rank.number, rank.order))

    def at(self, time_s: float, action: Callable[[], None]) -> Timer:
        """Call ``action`` when virtual time reaches ``time_s``, unless the timer is cancelled."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time_s, next(self._order), timer))
        return timer

    def kill(self, rank: Rank) -> None:
        """End a rank wherever it is, without notifying the others."""
        for strand in rank.strands:
            self._kill(strand)

    def _kill(self, strand: Strand) -> None:
        if not strand.has_ended:
            strand.is_killed = True
            self.ready(strand, self.now_s)

    def end_world(self, failure: BaseException) -> None:
        """End the world from within the running rank, which is unwound like the others."""
        if self.is_ending():  # called by code that is being unwound
            self._unwind()
        self.stop(failure)
        self._yield(self.current)

    def is_ending(self) -> bool:
        """Return whether the running strand is being unwound, or is about to be."""
        return self.is_stopping or self.current.is_killed

    def stop(self, failure: BaseException) -> None:
        """End the world: unwind every other rank, wherever it is."""
        self.failure = self.failure or failure
        if not self.is_stopping:
            self.is_stopping, self._stopped_s = True, self.now_s
            self.now_s = NEVER  # no rank has to wait any longer
            running = [strand for strand in self._strands() if not strand.has_ended]
            self.cut_short = [
                CutShort(rank.number, rank.waits_in, rank.clock_s)
                for rank in self.ranks
                if rank.waits_in is not None
            ]
            for strand in running:
                strand.waits_in = None
            self._ready = [(0.0, strand.number, strand.order) for strand in running]

    def _strands(self) -> Iterator[Strand]:
        for rank in self.ranks:
            yield from rank.strands

    # Handing over

    def _someone_is_earlier(self, rank: Strand) -> bool:
        if self._ready and self._ready[0] < (rank.clock_s, rank.number, rank.order):
            return True
        return self._next_event_s() <= rank.clock_s

    def _next_event_s(self) -> float:
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        source_s = self.source.next_event_s if self.source else NEVER
        if not self._timers:
            return source_s
        timer_s = self._timers[0][0]
        return timer_s if timer_s < source_s else source_s

    def _yield(self, rank: Strand) -> None:
        next_rank = self._next()
        if next_rank is not None and next_rank is not rank:
            self._on_switch(rank, next_rank)
            self.current = next_rank
            next_rank.baton.release()
            rank.baton.acquire()
        if self.is_stopping or rank.is_killed:
            self._unwind()

    def _unwind(self) -> NoReturn:
        if self.interrupted_by and not self.is_stopping:
            self.end_world(self.interrupted_by)
        self.current.num_unwound += 1
        if self.current.num_unwound > MAX_UNWOUND:
            self._park(self.current)
        raise Stopped if self.is_stopping else Killed

    def _park(self, rank: Strand) -> NoReturn:
        """Stop running a rank that catches all exceptions and keeps making calls."""
        baton, rank.has_ended, rank.is_parked = rank.baton, True, True
        self._hand_over(rank)
        while True:
            baton.acquire()

    def _hand_over(self, rank: Strand) -> None:
        """Pass on the baton of a strand that has ended."""
        next_rank = self._next()
        if next_rank is None:
            self._all_ended.release()
        else:
            self._on_switch(rank, next_rank)
            self.current = next_rank
            next_rank.baton.release()

    def _next(self) -> Strand | None:
        """Run events until a strand comes first; return that strand, or None if all have ended."""
        while True:
            event_s = NEVER if self.is_stopping else self._next_event_s()
            if self._ready and self._ready[0][0] < event_s:
                clock_s, number, order = heapq.heappop(self._ready)
                if clock_s > self.now_s:
                    self.now_s = clock_s
                return self.ranks[number].strands[order]
            if event_s < NEVER:
                self._run_events(event_s)
            elif all(strand.has_ended for strand in self._strands()):
                return None
            elif not self._dismiss():
                self._stop_deadlock()

    def _dismiss(self) -> bool:
        """Kill threads that only wait for work from a rank that has ended; return False if none do.

        Python does the same: at the end of a program, executors stop their threads.
        """
        idle = [
            strand
            for strand in self._strands()
            if strand.rank.has_ended and getattr(strand.waits_in, "ends_with_rank", False)
        ]
        for strand in idle:
            self._kill(strand)
        return bool(idle)

    def _run_events(self, now_s: float) -> None:
        """Run the events due now. An error ends the world, not just the rank that runs them."""
        self.now_s = now_s
        try:
            while self._timers and self._timers[0][0] <= now_s:
                action = heapq.heappop(self._timers)[2].action
                if action:
                    action()
            if self.source and self.source.next_event_s <= now_s:
                self.source.run_events(now_s)
        except BaseException as error:
            self.stop(error)

    def _stop_deadlock(self) -> None:
        if self._on_deadlock is None:
            raise RuntimeError("the scheduler is not running")
        try:
            self.stop(self._on_deadlock())
        except Exception as error:  # if it escaped, the baton would never be handed over
            self.stop(error)
