"""An operation in flight: posted by one rank, and done some virtual time later."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distlab.sim.report import Row, place
from distlab.sim.scheduler import Rank

if TYPE_CHECKING:
    from distlab.sim.simulation import Simulation

ANY_SOURCE = -1  # the peer of a recv from any rank


class Pending:
    """One rank's side of a communication.

    Attributes:
        rank: global number of the rank that posted it.
        name: "send", "recv", "all_reduce".
        group: global numbers of the group's ranks.
        num_bytes: of this rank's tensors.
        posted_s: virtual time of the call.
        done_s: virtual time of the end, once ``is_done``.
        site: file, line and function of the call.
        is_by_torch: torch made the call by itself, and keeps the handle.
    """

    __slots__ = (
        *("done_s", "group", "is_by_torch", "is_done", "name", "num_bytes"),
        *("posted_s", "rank", "site", "waiter", "world"),
    )
    kind = "collective"  # or "send", "recv", "store"
    peer = -1  # global rank of the other side, of a message
    number = -1  # of the message

    def __init__(
        self, world: "Simulation", name: str, group: tuple[int, ...], num_bytes: int
    ) -> None:
        rank = world.scheduler.current
        self.world = world
        self.rank = rank.number
        self.name = name
        self.group = group
        self.num_bytes = num_bytes
        self.posted_s = rank.clock_s
        self.done_s = 0.0
        self.is_done = False
        # Above: two constructors, the group's method.
        self.site, self.is_by_torch = world.places.call_site(sys._getframe(3))
        self.waiter: Rank | None = None

    def finish(self, at_s: float) -> None:
        """Mark it done, record it, and let its rank go on if it waits."""
        self.is_done = True
        self.done_s = at_s
        self.world.trace.finished(self)
        if self.waiter is not None:
            self.world.scheduler.ready(self.waiter, at_s)

    def wait(self) -> None:
        """Block the running rank until it is done; its clock is then at that time or later."""
        rank = self.world.scheduler.current
        start_s = rank.clock_s
        if not self.is_done:
            self.block()
        if self.done_s > rank.clock_s:
            rank.clock_s = self.done_s
        if rank.clock_s > start_s:
            self.world.waited(self, start_s)

    def block(self) -> None:
        """Let others run until it is done, which may move the running rank's clock."""
        if not self.is_done:
            self.waiter = self.world.scheduler.current
            self.world.scheduler.block(self)
            self.waiter = None

    def waits_for(self) -> Sequence[int]:
        """Global ranks that have yet to do their part."""
        raise NotImplementedError

    def title(self) -> str:
        """Write which call it is, for a sentence: ``recv``."""
        return self.name

    def text(self) -> str:
        """Write what was called, for a report: ``recv from rank 2, (4,) float32``."""
        raise NotImplementedError

    def where(self) -> str:
        """Write ``ring.py:41 in exchange``."""
        return place(self.site)

    def row(self) -> Row:
        """Return its line of a report."""
        return Row((self.rank,), self.text(), self.where())
