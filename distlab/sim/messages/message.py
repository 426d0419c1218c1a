"""A posted send or recv, from the call until its bytes have arrived."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from distlab.process_group.call import Form, describe
from distlab.sim.engine.clock import Clock
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.reporting.sites import CallSite, Site
from distlab.util.text import rank_names

PREPOSITIONS = {"send": "to", "recv": "from"}


class InLane(Protocol):
    """Where a message stands among those that run one after the other."""

    @property
    def is_batch(self) -> bool:
        """Whether it stands among batches."""

    def ahead(self) -> "list[Message]":
        """Return what has to be done before."""


class Postbox(Protocol):
    """Where messages are posted."""

    def close(self, late: "Message") -> None:
        """Close the connection of a message that has taken too long."""

    def why_closed(self, message: "Message") -> str:
        """Say who has closed the connection of a message; "": it is open."""

    def taken_at(self, recv: "Message") -> Site | None:
        """Return where a recv from any rank took a message that would have fit this recv."""

    def deliver(self, send: "Message", recv: "Message", at_s: float) -> None:
        """Give a recv what has arrived from its send."""


class Message(Pending):
    """A posted send or recv. Ranks are global; ``partner`` is the other side, once there is one.

    A pair has one ``number``, the send's.

    Attributes:
        mailbox: in which it was posted.
        key: of the group, for those that have the same ranks.
    """

    mailbox: "Postbox"
    key: object

    __slots__ = (
        *("arrived_s", "form", "is_eager", "key", "kind", "mailbox", "number", "partner"),
        *("payload", "peer", "source", "tag", "tensor", "turn"),
    )

    def __init__(
        self,
        clock: Clock,
        name: str,
        group: tuple[int, ...],
        tensor: Tensor,
        peer: int,
        source: int,
        tag: int,
        call: CallSite,
    ) -> None:
        Pending.__init__(self, clock, name, group, tensor.nbytes, call)  # faster than by super()
        self.kind = name
        self.tensor = tensor  # until it has arrived
        self.form = tensor.shape, tensor.dtype  # a plain tuple: made for every message
        self.peer = peer
        self.number = -1
        self.tag = tag
        self.payload: Tensor | None = None  # the tensor as it was when posted: eager, strict
        self.is_eager = False
        self.arrived_s: float | None = None
        self.partner: Message | None = None
        self.turn: InLane | None = None  # in its lane, where there are any, until it is done
        self.source = source  # rank inside the group that it comes from

    def expired(self, limit_s: float) -> Exception:
        """Close the connection; the error is that of an operation that has timed out."""
        error = super().expired(limit_s)
        self.fail(error, self.clock.current.clock_s)
        self.mailbox.close(self)
        return error

    def arrive(self, at_s: float) -> None:
        """Note that the bytes of this send have arrived."""
        self.arrived_s = at_s
        if self.partner is not None:
            self.mailbox.deliver(self, self.partner, at_s)

    def waits_for(self) -> Sequence[int]:
        """Return the peer, or every rank that could send; if others come first, their peers."""
        if ahead := self.ahead():
            return sorted({peer for message in ahead for peer in message.waits_for()})
        if self.peer == ANY_SOURCE:
            return [rank for rank in self.group if rank != self.rank]
        return (self.peer,)

    def ahead(self) -> "list[Message]":
        """Return what has to be done before this may start."""
        return self.turn.ahead() if self.turn else []

    def toward(self) -> str:
        """Write ``to rank 2``, ``from itself`` or ``from any rank``."""
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        return f"{PREPOSITIONS[self.name]} {'itself' if self.peer == self.rank else peer}"

    def text(self) -> str:
        """Write ``recv from rank 2, (4,) float32``, and the tag and the group if not the usual."""
        toward = PREPOSITIONS[self.name]
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        tag = f", tag {self.tag}" if self.tag else ""
        is_usual = len(self.group) == self.clock.num_ranks
        group = "" if is_usual else f", on the group of {rank_names(self.group)}"
        return f"{self.full_name()} {toward} {peer}, {describe(Form(*self.form))}{tag}{group}"
