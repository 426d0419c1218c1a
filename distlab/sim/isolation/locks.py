"""Locks for the threads of ranks: who waits for one waits in virtual time."""

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from distlab.sim.engine.scheduler import NEVER, Strand
from distlab.sim.isolation import awaited
from distlab.sim.messages.thread_wait import Look

real_lock = threading.Lock  # while a world runs, ranks that ask for a lock get one of their own


class Threads(Protocol):
    """The threads of ranks, as their locks see them."""

    def is_virtual(self) -> bool:
        """Return whether a rank's thread calls."""

    def running(self) -> Strand | None:
        """Return the thread of a rank that asks, if it is one."""

    def now_s(self) -> float:
        """Return the running rank's virtual time."""

    def ask(self) -> None:
        """Let a moment pass for a thread that asks whether something is free."""

    def wake(self, waiting: deque[Strand]) -> None:
        """Let threads try again."""

    def wait_until(
        self, is_done: Callable[[], bool], waiting: deque[Strand], until_s: float, look: Look
    ) -> bool:
        """Let others run until ``is_done()``, or the time is up; return whether it is done."""


class _Held:
    """A lock as ``with`` uses it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        raise NotImplementedError

    def release(self) -> None:
        """Give it back."""
        raise NotImplementedError

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class RankLock(_Held):
    """``threading.Lock`` for the threads of ranks."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = real_lock()
        self._waiting: deque[Strand] = deque()
        self._holder: Strand | None = None  # a thread of a rank, or None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, waiting in virtual time."""
        me = self._threads.running()
        if self._lock.acquire(False):
            self._holder = me
            return True
        if me is None or self._holder is None:  # a thread that is no rank's waits for it, or has it
            return self._lock.acquire(blocking, timeout)
        if not blocking:
            self._threads.ask()
            return False
        until_s = NEVER if timeout < 0 else self._threads.now_s() + timeout
        # The caller's frame. This call's own would hold itself by the lambda below, and with it all
        # that its callers hold, until the garbage collector comes by.
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
        """Give it back, and wake who waits for it."""
        self._lock.release()
        if self._threads.is_virtual():
            self._threads.wake(self._waiting)

    def locked(self) -> bool:
        """Return whether a thread has it."""
        return self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        self._waiting.clear()


class RankRLock(_Held):
    """``threading.RLock`` for the threads of ranks."""

    def __init__(self, threads: Threads) -> None:
        self._block = RankLock(threads)
        self._owner, self._count = 0, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, once more if it is the thread's own."""
        me = threading.get_ident()
        if self._owner == me:
            self._count += 1
            return True
        is_taken = self._block.acquire(blocking, timeout)
        if is_taken:
            self._owner, self._count = me, 1
        return is_taken

    def release(self) -> None:
        """Give it back, if it was taken once."""
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = 0
            self._block.release()

    # What threading.Condition asks for

    def _is_owned(self) -> bool:
        return self._owner == threading.get_ident()

    def _release_save(self) -> tuple[int, int]:
        state = self._count, self._owner
        self._count = self._owner = 0
        self._block.release()
        return state

    def _acquire_restore(self, state: tuple[int, int]) -> None:
        self._block.acquire()
        self._count, self._owner = state
