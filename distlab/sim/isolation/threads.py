"""Threads that a rank starts itself: heartbeats, savers, servers, prefetchers.

Only one thread of all ranks runs at a time, so a thread that a rank starts becomes one more strand
of the scheduler. Locks, and everything that Python builds on locks (conditions, events, semaphores,
queues, futures, executors), block it in virtual time instead of real time.

    rank 0            all_reduce · · · · · · · · · · all_reduce
    its heartbeat     sleep 1 s ── store.set ── sleep 1 s ── store.set

Locks created before the world runs stay real, because their owners do not communicate. So do locks
and threads that ``multiprocessing`` and ``ProcessPoolExecutor`` create for themselves: they wait in
real time for processes outside the simulated world, and so does a rank that waits for them.
"""

import contextlib
import logging
import math
import queue
import selectors
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import _base as futures
from concurrent.futures import thread as pools
from functools import partial
from itertools import count
from time import monotonic as real_monotonic
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.patience import POLL_S
from distlab.sim.engine.scheduler import NEVER, Killed, Scheduler, Stopped, Strand
from distlab.sim.isolation import awaited
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.isolation.thread_notes import ThreadNotes
from distlab.sim.messages.thread_wait import Look, ThreadWait
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.reporting.sites import Places, outside
from distlab.util.replacing import Replace

Around: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]
_real_thread, _real_lock = threading.Thread, threading.Lock
_real_start, _real_join, _real_is_alive = (
    _real_thread.start,
    _real_thread.join,
    _real_thread.is_alive,
)
_real_select: Any = selectors.DefaultSelector.select
NO_THREAD = -1  # matches no thread, so that `call_site` cannot fall back to a thread's start
SLICE_S = 0.05  # of a wait in real time
MAX_PAUSE_S = 1e-3  # longest pause between two polls of files
# Modules whose locks are for the code that calls them.
_ON_BEHALF = ("threading", "queue", "concurrent.futures._base")
STRAND = "_distlab_strand"  # attribute of a rank's thread that holds its strand


class Threads:
    """Turns the threads that ranks start into strands.

    Args:
        around: Function that returns a context manager in which to run a rank's thread, such as the
            rank's device.

    Attributes:
        notes: Notes on errors of threads and tasks, and on daemons that ended with their rank.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        rank_states: RankStates,
        places: Places,
        around: Around,
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._rank_states, self._places = rank_states, places
        self._around, self.notes = around, ThreadNotes(places)
        self._queues: Any = WeakKeyDictionary()  # not Python's, which awaits its threads at exit
        self._plain = threading.local()  # flags threads that currently get real locks
        self._of_processes = WeakSet[Any]()  # real locks of ranks, which wait for processes

    def install(self, replace: Replace) -> None:
        """Replace Python's locks and threads with simulated ones."""
        self._scheduler.describe_rest = self._sleep
        self._scheduler.on_abandoned = self._note_abandoned
        replace(threading, "Lock", self._lock)
        replace(threading, "RLock", self._rlock)
        replace(threading, "_allocate_lock", self._lock)
        replace(threading, "_time", time.monotonic)  # returns virtual time if a rank calls it
        replace(queue, "time", time.monotonic)
        replace(queue, "SimpleQueue", queue._PySimpleQueue)  # type: ignore[attr-defined]
        replace(pools, "_threads_queues", self._queues)
        self._make_waiters = replace(futures, "_create_and_install_waiters", self._waiter)
        replace(futures.LOGGER, "filters", [*futures.LOGGER.filters, _says_something])
        self.notes.watch_results(replace, self.running)
        replace(sys, "unraisablehook", partial(_say_unraised, sys.unraisablehook))
        replace(selectors.DefaultSelector, "select", _method(self._select))
        replace(_real_thread, "start", _method(self._start))
        replace(_real_thread, "join", _method(self._join))
        replace(_real_thread, "is_alive", _method(self._is_alive))
        replace(threading, "_counter", self._numbers(threading._counter, 1))  # type: ignore[attr-defined]
        numbers = self._numbers(ThreadPoolExecutor._counter, 0)  # type: ignore[attr-defined]
        replace(ThreadPoolExecutor, "_counter", staticmethod(numbers))

    def is_virtual(self) -> bool:
        """Return whether a lock or thread made now would belong to a rank."""
        return self._rank_states.is_in_rank() and not getattr(self._plain, "is_wanted", False)

    def running(self) -> Strand | None:
        """Return the calling strand, or None if the calling thread belongs to no rank."""
        return self._scheduler.current if self.is_virtual() else None

    def _lock(self) -> Any:
        return RankLock(self) if self._is_for_rank() else self._real(_real_lock())

    def _rlock(self) -> Any:
        # The pure-Python RLock is built on `_allocate_lock`, and therefore on RankLock.
        of_rank: Any = threading._PyRLock  # type: ignore[attr-defined]
        real: Any = threading._CRLock  # type: ignore[attr-defined]
        return of_rank() if self._is_for_rank() else self._real(real())

    def _is_for_rank(self) -> bool:
        """Return whether a lock made now is simulated."""
        return self.is_virtual() and not self._is_for_processes()

    def _real(self, lock: Any) -> Any:
        """Note a real lock if a rank makes it, and return it."""
        if not self.is_virtual():
            return lock
        if outside().f_code is threading.Condition.wait.__code__:
            lock = _SlicedLock(self._go_on)
        self._of_processes.add(lock)
        return lock

    def _is_for_processes(self) -> bool:
        """Return whether a lock made, or a thread started, now waits for real processes.

        A condition makes a lock for each wait: that is as real as the condition's own.
        """
        frame: FrameType | None = outside()
        while frame is not None and _module(frame) in _ON_BEHALF:
            if frame.f_code is threading.Condition.wait.__code__:
                return frame.f_locals["self"]._lock in self._of_processes
            frame = frame.f_back
        name = "" if frame is None else _module(frame)
        return name.startswith("multiprocessing.") or name == "concurrent.futures.process"

    def _go_on(self) -> None:
        """Let the rank's other threads go on while it waits for a process; end with the world."""
        if all(strand.has_ended for strand in self._scheduler.current.rank.strands[1:]):
            self._scheduler.act()
        else:
            self._clock.sleep(SLICE_S)

    def _waiter(self, waited: Any, return_when: object) -> Any:
        """Make what waits for some of several futures: for real if a process computes one."""
        locks = [future._condition._lock for future in waited]
        if not self.is_virtual() or self._of_processes.isdisjoint(locks):
            return self._make_waiters(waited, return_when)
        with self._plain_locks():
            waiter = self._make_waiters(waited, return_when)
        self._of_processes.add(waiter.event._cond._lock)
        return waiter

    @contextlib.contextmanager
    def _plain_locks(self) -> Iterator[None]:
        """Make real locks inside the block, in which a destructor may start another thread."""
        before = getattr(self._plain, "is_wanted", False)
        self._plain.is_wanted = True
        try:
            yield
        finally:
            self._plain.is_wanted = before

    def _numbers(self, of_process: Callable[[], int], first: int) -> Callable[[], int]:
        """Return a counter for thread names that counts per rank, as in separate processes."""
        of_ranks: defaultdict[int, Iterator[int]] = defaultdict(lambda: count(first))

        def number() -> int:
            is_of_rank = self._rank_states.is_in_rank()
            return next(of_ranks[self._rank_states.current]) if is_of_rank else of_process()

        return number

    # Threads

    def _start(self, thread: Any) -> None:
        if not self._rank_states.is_in_rank():
            _real_start(thread)
        elif self._is_for_processes():
            self._start_for_real(thread)
        else:
            site, *_ = self._places.call_site()
            strand = self._make_strand(thread)
            is_daemon, thread._daemonic = thread.daemon, True  # the process never waits for it
            self._start_for_real(thread)
            thread._daemonic = is_daemon
            strand.ident = thread.ident or 0
            self._places.note_start(strand.ident, site)

    def _start_for_real(self, thread: threading.Thread) -> None:
        with self._plain_locks():  # Python's start-up handshake takes place in real time
            thread._started = threading.Event()  # type: ignore[attr-defined]
            _real_start(thread)

    def _make_strand(self, thread: threading.Thread) -> Strand:
        """Prepare a thread to run as a strand of the running rank, and return the strand."""
        strand = self._scheduler.spawn(thread.name, is_daemon=thread.daemon)
        setattr(thread, STRAND, strand)
        run = thread.run

        def be_strand() -> None:
            self._scheduler.be(strand, lambda: self._run(thread, run))

        thread.run = be_strand  # type: ignore[method-assign]
        return strand

    def _run(self, thread: threading.Thread, run: Callable[[], None]) -> None:
        """Run a thread's function; an error ends only that thread, as in Python."""
        try:
            with self._around():
                run()
        except (SimulationError, Stopped, Killed):
            raise
        except BaseException as error:
            if not self._scheduler.is_ending():  # otherwise the unwinding may have caused the error
                trace = error.__traceback__.tb_next if error.__traceback__ else None
                error = error.with_traceback(trace)
                self.notes.failed(self._rank_states.current, thread.name, error)
                threading.excepthook(threading.ExceptHookArgs((type(error), error, trace, thread)))

    def _note_abandoned(self, strand: Strand) -> None:
        """Record where a daemon was when its rank ended."""
        frame = sys._current_frames().get(strand.ident)
        if frame is not None and not self._scheduler.is_stopping:
            site = self._places.call_site(frame, NO_THREAD)[0]
            start = self._places.call_site(frame, strand.ident)[0]
            self.notes.abandoned(strand.number, strand.name, site, start)

    def _join(self, thread: threading.Thread, timeout: float | None = None) -> None:
        strand: Strand | None = getattr(thread, STRAND, None)
        if strand is None or not self._rank_states.is_in_rank():
            return _real_join(thread, timeout)
        if strand is self._scheduler.current:
            raise RuntimeError("cannot join current thread")
        until_s = NEVER if timeout is None else self.now_s() + max(timeout, 0.0)
        self.wait_until(
            lambda: strand.has_ended, strand.waiting, until_s, lambda _: awaited.end_of(strand)
        )
        return None

    def _is_alive(self, thread: threading.Thread) -> bool:
        strand: Strand | None = getattr(thread, STRAND, None)
        return _real_is_alive(thread) if strand is None else not strand.has_ended

    # Waiting

    def _sleep(self, strand: Strand) -> ThreadWait:
        """Return a wait that stands for a thread that does nothing but sleep."""
        site = self._places.call_site(sys._current_frames()[strand.ident], strand.ident)
        return ThreadWait(self._clock, awaited.sleeps, site, strand)

    def now_s(self) -> float:
        """Return the running rank's virtual time."""
        return self._clock.current.clock_s

    def wait_until(
        self,
        is_done: Callable[[], bool],
        waiting: deque[Strand],
        until_s: float,
        look: Look,
    ) -> bool:
        """Let other strands run until ``is_done()`` holds or time is up; return whether it holds.

        Args:
            is_done: Condition, tested whenever the thread is woken.
            waiting: Queue of strands to wake when the condition may have changed.
            until_s: Virtual time at which to give up.
            look: Function that describes the wait for a report.
        """
        self._scheduler.act()  # lets strands with earlier clocks go first
        current, site = self._scheduler.current, self._places.call_site()
        operation = ThreadWait(self._clock, look, site, current)
        start_s, is_in_time = current.clock_s, True
        try:
            while is_in_time and not is_done():
                waiting.append(current)
                is_in_time = self._scheduler.block(operation, until_s)
        finally:  # also if the run ends: who is woken then would take it for its next wait's end
            with contextlib.suppress(ValueError):
                waiting.remove(current)
        if current.clock_s > start_s:
            self._clock.waited(operation.name, site[0], start_s)
        if not is_in_time:
            self._scheduler.rest()  # a thread that keeps retrying counts as sleeping
        return is_in_time or is_done()

    def _select(self, selector: Any, timeout: float | None = None) -> list[Any]:
        """Wait for files, as asyncio does between tasks, while the rank's other threads run.

        Nothing but these threads and time can wake an event loop that waits for no other process.
        """
        if not self.is_virtual():
            return _real_select(selector, timeout)  # type: ignore[no-any-return]
        strands = self._scheduler.current.rank.strands
        until_s, pause_s = NEVER if timeout is None else self.now_s() + timeout, POLL_S
        ready: list[Any] = _real_select(selector, 0)
        while not (ready or self.now_s() >= until_s or all(s.has_ended for s in strands[1:])):
            self._clock.sleep(min(pause_s, until_s - self.now_s()))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            ready = _real_select(selector, 0)
        if ready or self.now_s() >= until_s:
            return ready
        if _is_alone(selector):
            self._wait_for_time(until_s)
            return []
        return _real_select(selector, timeout)  # type: ignore[no-any-return]

    def _wait_for_time(self, until_s: float) -> None:
        """Wait as an event loop of asyncio does that no thread can wake."""
        if until_s == NEVER:
            self.wait_until(lambda: False, deque(), NEVER, awaited.asyncio_task)
        self._clock.sleep(until_s - self.now_s())

    def wake(self, waiting: deque[Strand]) -> None:
        """Wake the first waiting strand, so that it tries again."""
        if waiting:
            self._scheduler.ready(waiting.popleft(), self.now_s())

    def ask(self) -> None:
        """Count an unsuccessful poll, so that a thread that keeps polling sees time pass."""
        self._clock.read()


class _SlicedLock:
    """A real lock for which a rank waits in slices, after each of which the world may end it.

    Args:
        act: Function that the rank calls between slices; raises an error if the world has ended.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._lock, self._act = _real_lock(), act
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        end_s = real_monotonic() + timeout if timeout >= 0 else math.inf
        while not self._lock.acquire(blocking, max(0.0, min(SLICE_S, end_s - real_monotonic()))):
            if not blocking or real_monotonic() >= end_s:
                return False
            self._act()
        return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _says_something(record: logging.LogRecord) -> bool:
    """Return False for a log record that only reports the unwinding of an executor's thread."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, Stopped | Killed)


def _is_alone(selector: Any) -> bool:
    """Return whether an event loop of asyncio listens to nothing but its own pipe."""
    data = [key.data for key in selector.get_map().values()]
    callbacks = [getattr(x[0], "_callback", None) if isinstance(x, tuple) else None for x in data]
    return all(getattr(callback, "__name__", "") == "_read_from_self" for callback in callbacks)


def _say_unraised(say: Callable[[Any], object], unraised: Any) -> None:
    """Report an exception in a ``__del__`` or the like, unless it only unwinds a rank."""
    if not isinstance(unraised.exc_value, Stopped | Killed):
        say(unraised)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method in a plain function that can serve as a method of the patched class."""
    return lambda thread, *args, **kwargs: function(thread, *args, **kwargs)


class RankLock:
    """``threading.Lock`` for rank threads."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = _real_lock()
        self._waiting: deque[Strand] = deque()
        self._holder: Strand | None = None  # None if free, or held by a thread outside all ranks

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, waiting in virtual time."""
        me = self._threads.running()
        if self._lock.acquire(False):
            self._holder = me
            return True
        if me is None or self._holder is None:  # the caller or the holder is outside all ranks
            return self._lock.acquire(blocking, timeout)
        if not blocking:
            self._threads.ask()
            return False
        until_s = NEVER if timeout < 0 else self._threads.now_s() + timeout
        # Take the caller's frame: this call's own frame would refer to itself through the lambda
        # below, and keep all variables of its callers alive until the next garbage collection.
        caller = sys._getframe().f_back
        is_taken = self._threads.wait_until(
            lambda: self._lock.acquire(False),
            self._waiting,
            until_s,
            lambda waiting: awaited.of_lock(caller, self._holder, waiting),
        )
        if is_taken:
            self._holder = me
        return is_taken

    def release(self) -> None:
        """Release the lock, and wake the first strand that waits for it."""
        self._lock.release()
        if self._threads.is_virtual():
            self._threads.wake(self._waiting)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        self._waiting.clear()
