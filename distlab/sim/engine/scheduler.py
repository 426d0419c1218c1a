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

A world may have several runs. A run ends once all that it awaits have ended and nothing is under
way; time limits and faults that are due later are left to the runs that get there.
"""

import contextlib
import ctypes
import heapq
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol

from distlab.sim.engine.patience import MAX_POLLS, Operation, Patience

NEVER = float("inf")
FIRST_S = -1.0  # the time of strands that come before all others
# Limit on the calls of a rank that is being ended. A `finally` makes a few; a loop that catches
# every exception would go on forever.
MAX_UNWOUND = 100
INTERRUPT_S = 0.01  # real seconds between two attempts to interrupt a rank
MAX_INTERRUPTS = 500  # attempts in a row on one rank, which may be in C code
MAX_SPARED = 200  # attempts that are left out while a rank handles the one before
PAGE_BYTES = 2**12
STACKS_BYTES = 2**29  # addresses for all ranks' stacks
STACK_BYTES = 2**19, 2**23  # least and most for a rank; endless recursion needs up to 4 MiB


class Stopped(BaseException):
    """Raised inside a rank whose world has ended, to unwind it. Programs should not catch it."""


class Killed(BaseException):
    """Raised inside a rank that a fault has killed."""


def _is_cleaning_up(thread: int) -> bool:
    """Return whether a thread is in a ``finally`` or ``except`` that Stopped has made it enter."""
    current: Any = sys._current_exceptions().get(thread)
    error = current[1] if isinstance(current, tuple) else current  # a tuple before Python 3.12
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None


def _stack_bytes(num_ranks: int) -> int:
    """Return the size of a rank's stack: 8 MiB for up to 64 ranks, 512 KiB for 1,024."""
    least, most = STACK_BYTES
    return min(most, max(least, STACKS_BYTES // num_ranks // PAGE_BYTES * PAGE_BYTES))


class EventSource(Protocol):
    """A source of events besides the timers; in practice, the network.

    Attributes:
        next_event_s: Time of the next event, or NEVER. Read at every hand-over.
    """

    next_event_s: float

    def run_events(self, now_s: float) -> None:
        """Run the events that are due at ``now_s``."""


STUCK: set[int] = set()  # threads with an exception that is due once they return from C code

_new_baton = threading.Lock  # the real lock; while a world runs, ranks get virtual ones
_new_event = threading.Event
_new_endings: Callable[[], SimpleQueue[bool]] = SimpleQueue  # True: all ended; False: interrupted
_new_queue: Callable[[], SimpleQueue[Callable[[], None] | None]] = SimpleQueue


def _nothing() -> None:
    pass


class Timer:
    """An action due at a virtual time; ``action`` is None once the timer is cancelled.

    Attributes:
        is_work: True for work under way, which a run awaits; False for a time limit or a fault.
    """

    __slots__ = ("action", "is_work")

    def __init__(self, action: Callable[[], None], *, is_work: bool) -> None:
        self.action: Callable[[], None] | None = action
        self.is_work = is_work


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

    @property
    def is_idle(self) -> bool:
        """True while it waits for another thread of its rank, as a pool's thread for a task."""
        return getattr(self.waits_in, "ends_with_rank", False)

    def __repr__(self) -> str:
        thread = f", thread {self.order}," if self.order else ""
        return f"rank {self.number}{thread} at {self.clock_s:.9f} s"


class Rank(Strand):
    """One simulated rank: its first thread, and the data that its threads share.

    Attributes:
        strands: All its threads, the first one being the rank itself.
        takes_part: True if the rank is one of those of the present run.
        num_calls: Number of torch.distributed calls that it has made in this run.
        last_call: Operation of the latest of them, or None.
    """

    def __init__(self, number: int) -> None:
        super().__init__(0, 0.0)
        self.rank, self.number = self, number
        self.strands: list[Strand] = [self]
        self.takes_part = True
        self.num_calls = 0
        self.last_call: object = None
        self.worker: Worker | None = None

    def renew(self, clock_s: float, *, takes_part: bool) -> None:
        """Get ready for another run; a rank that takes part becomes ready, unless it is dead."""
        self.takes_part, self.clock_s = takes_part, clock_s
        self.has_ended = not takes_part or self.is_killed
        self.strands = [self, *(strand for strand in self.strands[1:] if not strand.has_ended)]
        for order, strand in enumerate(self.strands):
            strand.order = order
        self.num_unwound, self.waits_in, self.doing = 0, None, ""
        self.num_calls, self.last_call = 0, None
        self.patience, self.waiting = Patience(clock_s), deque()
        if self.is_parked:
            self.is_parked, self.worker = False, None
            self.baton = _new_baton()
            self.baton.acquire()

    @property
    def has_left(self) -> bool:
        """True once the rank has ended, and none of its threads does anything more."""
        return self.has_ended and all(s.has_ended or s.is_idle for s in self.strands)


class CutShort(NamedTuple):
    """A rank's wait for an operation that had not ended at the end of a run."""

    rank: int
    operation: Any
    since_s: float


class Scheduler:
    """Runs the ranks of one world in the order of their clocks.

    Attributes:
        current: The running strand.
        cut_short: Waits that an error has ended in this run, of the first thread of each rank.
        now_s: Time of the latest event or ``act``.
        keeps_threads: True if threads that ranks have started live on after a run, and after an
            error unless they communicate; False if a run awaits them, as a Python process does.
        is_lost: True once a rank could not be interrupted.
        interrupted_by: Error that ends an interrupted run, or None.
        describe_rest: Function that returns the operation to report for a strand that only sleeps.
        describe_interrupt: Function that returns the error for a run interrupted in a strand.
        is_in_program: Function that returns whether a frame is of the program, or of a library that
            the program calls. A strand is interrupted only there: between two lines of the
            simulator, an exception would leave it in disorder.
        on_abandoned: Function called for each daemon thread that is killed as its rank has ended.
    """

    def __init__(self, num_ranks: int, on_switch: Callable[[Strand, Strand], None]) -> None:
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.current: Strand = self.ranks[0]
        self.now_s = 0.0
        self.source: EventSource | None = None
        self.keeps_threads = self.is_stopping = self.is_lost = False
        self.failure: BaseException | None = None
        self.interrupted_by: BaseException | None = None
        self.cut_short: list[CutShort] = []
        self.describe_rest: Callable[[Strand], object] = repr
        self.describe_interrupt: Callable[[Strand], BaseException] = lambda _: KeyboardInterrupt()
        self.is_in_program: Callable[[FrameType], bool] = lambda _: False
        self.on_abandoned: Callable[[Strand], None] = lambda _: None
        self._on_switch = on_switch  # called with (from, to), to swap the ranks' process state
        self._on_deadlock: Callable[[], BaseException] | None = None
        self._ready = [(0.0, number, 0) for number in range(num_ranks)]  # (clock, rank, strand)
        self._awaited: set[Strand] = {*self.ranks}  # strands that the run awaits
        self._stopped_s = 0.0  # value of `now_s` when the run was stopped
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._endings = _new_endings()

    def run(self, body: Callable[[Rank], None], on_deadlock: Callable[[], BaseException]) -> None:
        """Run ``body`` on the ready ranks until all have ended; raise the error that ended the run.

        Args:
            body: Function called for each rank, in that rank's thread.
            on_deadlock: Function that returns the error to raise when no rank can continue.
        """
        self._on_deadlock = on_deadlock
        self._start(body)
        self.current = self._strand(*heapq.heappop(self._ready))
        self.current.baton.release()
        self._await_end()
        failure, self.failure = self.failure or self.interrupted_by, None
        if failure:
            raise failure

    def _start(self, body: Callable[[Rank], None]) -> None:
        usual = threading.stack_size(_stack_bytes(len(self.ranks)))
        ranks = [self.ranks[number] for _, number, order in self._ready if not order]
        try:
            for rank in ranks:
                rank.worker = rank.worker or Worker(f"rank {rank.number}")
                rank.ident = rank.worker.ident
        finally:
            threading.stack_size(usual)
        for rank in ranks:
            if rank.worker:
                rank.worker.begin(partial(self.be, rank, partial(body, rank)))

    def interrupt(self) -> None:
        """End the present run; may be called in any thread, and by a signal's handler."""
        self._endings.put(False)

    def _await_end(self) -> None:
        """Wait until all strands have ended; if the user interrupts that, make them end."""
        has_ended = False
        while not has_ended and not self.is_lost:
            try:
                has_ended = self._make_end() if self.interrupted_by else self._endings.get()
            except KeyboardInterrupt:
                has_ended = False
            if not has_ended:
                self.interrupted_by = self.interrupted_by or self.describe_interrupt(self.current)

    def _make_end(self) -> bool:
        """Interrupt the ranks until they end; give up on one that neither returns nor calls."""
        strand, num_attempts = self.current, 0
        while num_attempts < MAX_INTERRUPTS:
            with contextlib.suppress(Empty):
                if self._endings.get(timeout=INTERRUPT_S):
                    for worker in self._workers():
                        worker.settle()
                    return True
            num_attempts = num_attempts + 1 if strand is self.current else 1
            strand = self.current
            if not _is_cleaning_up(strand.ident) or num_attempts % MAX_SPARED == 0:
                self._interrupt(strand)
        self.is_lost = True
        STUCK.add(strand.ident)
        if strand.has_ended:  # meanwhile
            STUCK.discard(strand.ident)
        self._on_switch = lambda *_: None  # the process is no longer the ranks'
        return False

    def _interrupt(self, strand: Strand) -> None:
        """Raise Stopped in a strand, unless the simulator, or a library for it, runs there.

        Code that calls the simulator is stopped by the scheduler itself.
        """
        frame = sys._current_frames().get(strand.ident)
        if frame is not None and self.is_in_program(frame):
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(strand.ident), ctypes.py_object(Stopped))

    def _workers(self) -> Iterator[Worker]:
        """Yield the ranks' threads, but for those that will never end."""
        for rank in self.ranks:
            if rank.worker and not rank.is_parked:
                yield rank.worker

    def first(self) -> Strand:
        """Return the strand that will begin the next run."""
        return self._strand(*self._ready[0])

    def renew(self, ranks: Collection[int]) -> None:
        """Make ranks ready for another run, which begins at the latest of all ranks' times.

        The threads that live on go on in it, those of other ranks as well.
        """
        now_s, going_on = self.latest_s(), [self._strand(*entry) for entry in self._ready]
        self._ready, self._awaited, self._endings = [], set(), _new_endings()
        for rank in self.ranks:
            rank.renew(now_s, takes_part=rank.number in ranks)
            going_on += [] if rank.has_ended else [rank]
            self._awaited.update(s for s in rank.strands if not s.has_ended and self._awaits(s))
        for strand in going_on:
            strand.clock_s = max(strand.clock_s, now_s)
            self._enqueue(strand)
        self._timers = [timer for timer in self._timers if timer[2].action]
        heapq.heapify(self._timers)
        self.now_s, self.is_stopping, self.interrupted_by = now_s, False, None
        self.cut_short = []

    def _awaits(self, strand: Strand) -> bool:
        """Return whether a run awaits the end of a strand."""
        return strand is strand.rank or not self.keeps_threads

    def _strand(self, _: float, number: int, order: int) -> Strand:
        return self.ranks[number].strands[order]

    def _enqueue(self, strand: Strand) -> None:
        heapq.heappush(self._ready, (strand.clock_s, strand.number, strand.order))

    def latest_s(self) -> float:
        """Return the latest time of all ranks and events."""
        ended_s = self._stopped_s if self.is_stopping else self.now_s
        return max(ended_s, *(rank.clock_s for rank in self.ranks))

    def drain(self) -> None:
        """Finish the work that is under way after a run was stopped."""
        self.now_s, self.is_stopping = self.latest_s(), False
        while self._has_work():
            self._run_events(max(self._next_event_s(), self.now_s))

    def _has_work(self) -> bool:
        """Return whether a message or the like is under way."""
        has_traffic = self.source is not None and self.source.next_event_s < NEVER
        return has_traffic or any(timer.is_work and timer.action for _, _, timer in self._timers)

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
        if self._awaits(strand):
            self._awaited.add(strand)
        self._enqueue(strand)
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
        STUCK.discard(strand.ident)
        if self.interrupted_by:
            self.stop(self.interrupted_by)
        for other in strand.waiting:
            self.ready(other, strand.clock_s)
        if strand is strand.rank and not self.keeps_threads:
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
            self._enqueue(rank)
            self._yield(rank)
        if self.is_stopping or rank.is_killed or self.interrupted_by:
            self._unwind()

    def go_last(self) -> None:
        """Let all others go on that are ready at the running rank's time, or before it."""
        rank = self.current
        at_s, rank.clock_s = rank.clock_s, math.nextafter(rank.clock_s, NEVER)
        rank.patience.acts(at_s, is_progress=True)
        try:
            self.act()
            self.now_s = at_s
        finally:
            rank.clock_s = at_s

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
        give_up = partial(self._give_up, rank, operation)
        timer = self.at(max(until_s, self.now_s), give_up, is_work=False)
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
        for strand in self.strands():
            asks = strand.patience.asks
            if asks is not None and strand.waits_in is None and not strand.has_ended:
                strand.waits_in = asks()
        self._enqueue(rank)
        self._stop_deadlock()
        self._yield(rank)

    def _all_poll(self) -> bool:
        """Return True if every rank polls or waits, and no event is pending."""
        waiting = (self._strand(*entry) for entry in self._ready)
        return self._next_event_s() == NEVER and all(strand.patience.asks for strand in waiting)

    def ready(self, rank: Strand, at_s: float) -> None:
        """Let a strand continue at ``at_s`` or later, if it is blocked."""
        if rank.waits_in is None:
            return
        rank.waits_in = None
        if at_s > rank.clock_s:
            rank.clock_s = at_s
        self._enqueue(rank)

    def at(self, time_s: float, action: Callable[[], None], *, is_work: bool = True) -> Timer:
        """Call ``action`` when virtual time reaches ``time_s``, unless the timer is cancelled.

        Args:
            time_s: Virtual time.
            action: Function to call.
            is_work: False for a time limit or a fault, which no run awaits.
        """
        timer = Timer(action, is_work=is_work)
        heapq.heappush(self._timers, (time_s, next(self._order), timer))
        return timer

    def kill(self, rank: Rank) -> None:
        """End a rank wherever it is, for good, without notifying the others."""
        rank.is_killed = rank.is_killed or not rank.has_left
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
        """End the run: unwind every other strand, wherever it is.

        Of threads that live on after a run, only those that run or communicate now are unwound.
        """
        self.failure = self.failure or failure
        if self.is_stopping:
            return
        self.is_stopping, self._stopped_s = True, self.now_s
        self.now_s = NEVER  # no rank has to wait any longer
        self.cut_short = [
            CutShort(rank.number, rank.waits_in, rank.clock_s)
            for rank in self.ranks
            if rank.waits_in is not None
        ]
        queued = [self._strand(*entry) for entry in self._ready]
        idle = (strand for strand in self.strands() if strand.is_idle)
        stays = {strand for strand in (*queued, *idle) if not self._awaits(strand)}
        self._awaited = {s for s in self.strands() if not s.has_ended} - stays
        for strand in (*self._awaited, *queued):
            strand.waits_in = None
        self._ready = [(FIRST_S, strand.number, strand.order) for strand in self._awaited]
        self._ready += [(s.clock_s, s.number, s.order) for s in queued if s in stays]
        heapq.heapify(self._ready)

    def strands(self) -> Iterator[Strand]:
        """Yield the threads of all ranks."""
        for rank in self.ranks:
            yield from rank.strands

    # Handing over

    def _someone_is_earlier(self, rank: Strand) -> bool:
        if self._ready and self._ready[0] < (rank.clock_s, rank.number, rank.order):
            return True
        if not self._awaited and rank.clock_s > self._end_s():
            return True  # what comes then is left to the next run
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
        if next_rank is not rank:
            self._pass_baton(rank, next_rank)
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
        """Pass on the baton of a strand that has ended; at the end of a run, to the caller."""
        self._awaited.discard(rank)
        self._pass_baton(rank, self._next())

    def _pass_baton(self, rank: Strand, next_rank: Strand | None) -> None:
        if next_rank is None:
            self._endings.put(True)
        else:
            self._on_switch(rank, next_rank)
            self.current = next_rank
            next_rank.baton.release()

    def _next(self) -> Strand | None:
        """Run events until a strand comes first; return it, or None at the end of the run.

        When all that the run awaits have ended, threads that live on catch up with them.
        """
        while True:
            event_s = NEVER if self.is_stopping else self._next_event_s()
            until_s = NEVER if self._awaited else self._end_s()
            if self._ready and self._ready[0][0] < event_s and self._ready[0][0] <= until_s:
                clock_s, number, order = heapq.heappop(self._ready)
                if clock_s > self.now_s:
                    self.now_s = clock_s
                return self.ranks[number].strands[order]
            if event_s < NEVER and (event_s <= until_s or self._has_work()):
                self._run_events(max(event_s, self.now_s))
            elif not self._awaited:
                return None
            elif not self._dismiss():
                self._stop_deadlock()

    def _end_s(self) -> float:
        """Return the time at which the ranks that took part in the run have ended."""
        return FIRST_S if self.is_stopping else max(rank.clock_s for rank in self.ranks)

    def _dismiss(self) -> bool:
        """Kill threads that only wait for work from a rank that has ended; return False if none do.

        Python does the same: at the end of a program, executors stop their threads.
        """
        idle = [
            strand
            for strand in self.strands()
            if strand.rank.has_ended and strand.is_idle and not self.keeps_threads
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
