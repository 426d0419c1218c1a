"""A thread of a rank that waits for another thread of it: for a lock, a queue, an end."""

from collections.abc import Sequence

from distlab.sim.engine.clock import Clock
from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.sites import CallSite


class ThreadWait(Pending):
    """Waits for its own rank; ``what`` says what for: ``a lock of its own``."""

    __slots__ = ("what",)
    kind = "thread"
    ends_with_rank = True

    def __init__(self, clock: Clock, what: str, call: CallSite) -> None:
        super().__init__(clock, "wait for a thread", (clock.current.number,), 0, call)
        self.what = what

    def waits_for(self) -> Sequence[int]:
        """Return its own rank: another thread of it has to go on."""
        return (self.rank,)

    def text(self) -> str:
        """Write ``waits for a lock of its own``."""
        return f"waits for {self.what}"
