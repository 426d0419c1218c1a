"""A thread of a rank that waits for another thread of it: for a lock, a queue, an end."""

from collections.abc import Sequence
from typing import NamedTuple

from distlab.sim.engine.clock import Clock
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.sites import CallSite


class Awaited(NamedTuple):
    """What threads wait for: what it is, and what to look for if it never comes."""

    text: str
    advice: str


LOCK = Awaited(
    "a lock of its own",
    "Is a release() missing, does one thread take it twice, or does the thread that has it wait "
    "for something else?",
)
ITEM = Awaited(
    "an item of a queue of its own",
    "Is a put() missing, or does the thread end that should put one more?",
)
ROOM = Awaited(
    "room in a queue of its own, which is full",
    "Is a get() missing, or does the thread end that should take items out?",
)
DONE = Awaited(
    "the end of the work on a queue of its own", "Is a task_done() missing after one of the get()?"
)
EVENT = Awaited("an event of its own", "Is its set() missing, or does the thread end that sets it?")
CONDITION = Awaited("a condition of its own", "Is a notify() missing, or was it too early?")
SEMAPHORE = Awaited("a semaphore of its own", "Is a release() missing for one of the acquire()?")
BARRIER = Awaited(
    "other threads at a barrier of its own", "Do as many threads come as the barrier was made for?"
)
RESULT = Awaited(
    "the result of a task of its own", "Does that task wait for this thread, or for a free worker?"
)
END = "That thread cannot end: see what it waits for."
ONLY_SLEEPS = Awaited(
    "something, and only sleeps",
    "No rank will do anything any more: what it looks for between its sleeps, a file, a flag or an "
    "answer, cannot change.",
)


class ThreadWait(Pending):
    """Waits for its own rank: ``awaited`` says what for."""

    __slots__ = ("awaited",)
    kind = "thread"
    is_recorded = False
    ends_with_rank = True

    def __init__(self, clock: Clock, awaited: Awaited, call: CallSite) -> None:
        super().__init__(clock, "wait for a thread", (clock.current.number,), 0, call)
        self.awaited = awaited

    def waits_for(self) -> Sequence[int]:
        """Return its own rank: another thread of it has to go on."""
        return (self.rank,)

    def text(self) -> str:
        """Write ``waits for a lock of its own``."""
        return f"waits for {self.awaited.text}"
