"""Waits between the threads of a rank: for a lock, a queue, or the end of a thread.

    main ──▶ 'saver' ──▶ room in a queue         main waits for the end of the thread 'saver'

An arrow means "waits for". A thread that waits for a lock waits for the thread that holds it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import Strand
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.sites import CallSite


class Awaited(NamedTuple):
    """Description of a thread's wait (for a lock, a queue, a thread's end), and advice on it.

    Attributes:
        by: Thread that has to continue first, or None if it is unknown.
        is_lock: True for a lock, which ``by`` holds.
    """

    text: str
    advice: str
    by: Strand | None = None
    is_lock: bool = False


Look: TypeAlias = Callable[[Strand], Awaited]  # describes what a blocked thread waits for


class ThreadWait(Pending):
    """A thread's wait for another thread of its own rank.

    Args: look: Function that describes the wait; called only for reports, while the wait lasts.
    """

    __slots__ = ("_look",)
    kind = "thread"
    is_recorded = False
    ends_with_rank = True

    def __init__(self, clock: Clock, look: Look, call: CallSite, strand: Strand) -> None:
        super().__init__(clock, "wait for a thread", (strand.number,), 0, call)
        self.rank, self.waiters, self._look = strand.number, (strand,), look

    @property
    def awaited(self) -> Awaited:
        """Current description of the wait."""
        return self._look(self.waiters[0])

    def waits_for(self) -> Sequence[int]:
        """Return the thread's own rank, because another of its threads has to continue first."""
        return (self.rank,)

    def text(self) -> str:
        """Return text such as ``waits for a lock of its own``."""
        return f"waits for {self.awaited.text}"

    def chain(self) -> list["ThreadWait"]:
        """Return this wait, the wait of the thread it waits for, and so on, without repetitions."""
        waits, following = [self], self.following()
        while isinstance(following, ThreadWait) and following not in waits:
            waits.append(following)
            following = following.following()
        return waits

    def following(self) -> object:
        """Return the wait of the thread that has to continue first, or None if it is unknown."""
        by = self.awaited.by
        return by.waits_in if by else None


def thread_name(strand: Strand) -> str:
    """Return ``the main thread``, or a name such as ``thread 'saver'``."""
    return f"thread {strand.name!r}" if strand.name else "the main thread"


def beside(wait: Pending) -> list[ThreadWait]:
    """Return every other ``ThreadWait`` in which a thread of the same rank is blocked."""
    strands = wait.waiters[0].rank.strands if wait.waiters else []
    return [
        strand.waits_in
        for strand in strands
        if isinstance(strand.waits_in, ThreadWait) and strand.waits_in is not wait
    ]
