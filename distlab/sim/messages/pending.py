"""An operation in flight: posted by one rank, and done some virtual time later."""

from collections.abc import Sequence

from torch import Tensor

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import Rank
from distlab.sim.messages.buffers import same_bytes
from distlab.sim.reporting.report import Row, mismatch, place
from distlab.sim.reporting.sites import CallSite

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
        *("clock", "posted_s", "rank", "site", "waiter"),
    )
    kind = "collective"  # or "send", "recv", "store"
    peer = -1  # global rank of the other side, of a message
    number = -1  # of the message

    def __init__(
        self, clock: Clock, name: str, group: tuple[int, ...], num_bytes: int, call: CallSite
    ) -> None:
        rank = clock.current
        self.clock = clock
        self.rank = rank.number
        self.name = name
        self.group = group
        self.num_bytes = num_bytes
        self.posted_s = rank.clock_s
        self.done_s = 0.0
        self.is_done = False
        self.site, self.is_by_torch = call
        self.waiter: Rank | None = None

    def finish(self, at_s: float) -> None:
        """Mark it done, record it, and let its rank go on if it waits."""
        self.is_done = True
        self.done_s = at_s
        if self.kind != "store":  # what a rank waits for there is recorded by ``waited``
            self.clock.trace.record(
                self.rank,
                self.kind,
                self.name,
                self.posted_s,
                at_s,
                self.num_bytes,
                self.peer,
                self.site,
                self.number,
            )
        if self.waiter is not None:
            self.clock.ready(self.waiter, at_s)

    def wait(self) -> None:
        """Block the running rank until it is done; its clock is then at that time or later."""
        rank = self.clock.current
        start_s = rank.clock_s
        if not self.is_done:
            self.block()
        if self.done_s > rank.clock_s:
            rank.clock_s = self.done_s
        if rank.clock_s > start_s:
            self.clock.waited(self.name, self.site, start_s)

    def block(self) -> None:
        """Let others run until it is done, which may move the running rank's clock."""
        if not self.is_done:
            self.waiter = self.clock.current
            self.clock.block(self)
            self.waiter = None

    def check_unchanged(self, tensor: Tensor, before: Tensor) -> None:
        """Raise if one of its tensors was written while it was under way.

        Raises:
            Mismatch: it was.
        """
        if tensor.is_meta or same_bytes(tensor.detach(), before):
            return
        raise mismatch(
            "buffer changed",
            f"rank {self.rank} changed the tensor of its {self.name} before wait() had returned",
            [self.row()],
            "Until then the network may still read it.",
        )

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
