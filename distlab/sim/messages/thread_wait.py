"""A thread of a rank that waits for another thread of it: for a lock, a queue, an end."""

from collections.abc import Sequence

from distlab.sim.messages.pending import Pending


class ThreadWait(Pending):
    """Waits for its own rank. ``name`` says what for: ``a lock``."""

    __slots__ = ()
    kind = "thread"
    ends_with_rank = True

    def waits_for(self) -> Sequence[int]:
        """Return its own rank: another thread of it has to go on."""
        return (self.rank,)

    def text(self) -> str:
        """Write ``waits for a lock``."""
        return f"waits for {self.name}"
