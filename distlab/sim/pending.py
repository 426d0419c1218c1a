"""An operation in flight: posted by one rank, some virtual time later done."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from distlab import process_group
from distlab.sim.report import Row, place

if TYPE_CHECKING:
    from distlab.sim.scheduler import Rank
    from distlab.sim.simulation import Simulation

Site = tuple[str, int, str]  # file, line, function

_SKIPPED = (
    *(str(Path(file).parent) for file in (torch.__file__, process_group.__file__, __file__)),
    "<frozen",
)
_is_skipped: dict[str, bool] = {}


def call_site(within: FrameType | None = None) -> Site:
    """Find the innermost frame, from ``within`` on, that is neither torch's nor ours."""
    frame = within or sys._getframe(4)  # above: this, two constructors, the group's method
    while True:
        file = frame.f_code.co_filename
        skip = _is_skipped.get(file)
        if skip is None:
            skip = _is_skipped[file] = file.startswith(_SKIPPED)
        if not skip or frame.f_back is None:
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


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
    """

    __slots__ = (
        *("done_s", "group", "is_done", "name", "num_bytes"),
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
        self.site = call_site()
        self.waiter: Rank | None = None

    def finish(self, at_s: float) -> None:
        """Mark it done, record it, and let its rank go on if it waits."""
        self.is_done = True
        self.done_s = at_s
        self.world.trace.finished(self)
        if self.waiter is not None:
            self.world.scheduler.ready(self.waiter, at_s)

    def wait(self) -> None:
        """Block the running rank until it is done; its clock is then not before that."""
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
