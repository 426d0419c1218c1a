"""Sends and recvs, from the call until the bytes arrive, and the turns in which they start.

NCCL runs the point-to-point operations of a stream one after another. Each rank has one stream per
group and peer, for operations that it posts singly, and one stream per group for batches. The
operations of a batch, passed to one call of ``batch_isend_irecv``, start together:

    isend(1); irecv(1)              rank 0 ── 1     send ─▶ recv      the recv starts when the
                                                                      send is done
    batch_isend_irecv([…, …])       rank 0, batches   send
                                                      recv            both start together
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from distlab.process_group.call import Form, describe
from distlab.sim.engine.clock import Clock
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.reporting.sites import CallSite, Site
from distlab.util.text import rank_names

PREPOSITIONS = {"send": "to", "recv": "from"}
_BATCHES = -2  # replaces the peer in the keys of lanes for batches


class Communicator(NamedTuple):
    """Identity of one of NCCL's communicators, on which a message meets its other side.

    Attributes:
        group: Identity of the group.
        pair: The two ranks that have it to themselves; () if it is the whole group's.
    """

    group: object
    pair: tuple[int, ...] = ()


class Postbox(Protocol):
    """The methods of the mailbox that messages call."""

    def next_number(self) -> int: ...
    def close(self, late: "Message") -> None: ...
    def why_closed(self, message: "Message") -> str: ...
    def taken_at(self, recv: "Message") -> Site | None: ...
    def deliver(self, send: "Message", recv: "Message", at_s: float) -> None: ...


class Message(Pending):
    """A posted send or recv. Apart from ``turn``, only its own methods change it.

    Ranks are global unless stated otherwise. Both sides of a message share one ``number``, which
    the send gets when it is posted.

    Attributes:
        key: Identity of the group; even groups of the same ranks have different keys. On NCCL, it
            is a ``Communicator``.
        tensor: The program's buffer; deleted once the bytes have arrived.
        form: Shape and dtype; a plain tuple, because one is made for every message.
        source: Rank that sends the message, numbered inside the group.
        payload: Copy of a send's tensor as posted, for an eager send or in strict mode; else None.
        arrived_s: Virtual time at which the bytes of a send arrived, or None.
        partner: Message of the other side, once the two are matched.
        turn: Turn of the message in its lane, until it is done; None if it is in no lane.
    """

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
        key: object,
        mailbox: Postbox,
    ) -> None:
        Pending.__init__(self, clock, name, group, tensor.nbytes, call)  # faster than super()
        self.kind = name
        self.key, self.mailbox = key, mailbox
        self.tensor = tensor
        self.form = tensor.shape, tensor.dtype
        self.peer = peer
        self.number = mailbox.next_number() if name == "send" else -1
        self.tag = tag
        self.source = source
        self.payload: Tensor | None = None
        self.is_eager = False
        self.arrived_s: float | None = None
        self.partner: Message | None = None
        self.turn: Turn | None = None

    def keep(self, payload: Tensor, *, is_eager: bool) -> None:
        """Keep a copy of the tensor as posted, to deliver (if eager) or to compare (if strict)."""
        self.payload, self.is_eager = payload, is_eager

    def start(self, at_s: float) -> None:
        """Start the message's turn at ``at_s``, which then counts as the time of its posting."""
        self.posted_s = at_s

    def meet(self, recv: "Message") -> None:
        """Make this send and ``recv`` the two sides of one message."""
        self.partner, recv.partner = recv, self
        recv.peer, recv.number = self.rank, self.number

    def release(self, source: int) -> None:
        """Drop tensors and partner, which a handle that is never waited for would keep alive."""
        self.source = source
        self.partner = self.payload = None
        del self.tensor

    def let_go(self) -> None:
        """Drop the tensors and partner of a message that has been aborted."""
        if hasattr(self, "tensor"):
            self.release(self.source)

    def expired(self, limit_s: float) -> Exception:
        """Make the message fail, close its connection, and return the timeout error."""
        error = super().expired(limit_s)
        self.fail(error, self.clock.current.clock_s)
        self.mailbox.close(self)
        return error

    def arrive(self, at_s: float) -> None:
        """Note that the bytes of this send have arrived; deliver them if its recv is posted."""
        self.arrived_s = at_s
        if self.partner is not None:
            self.mailbox.deliver(self, self.partner, at_s)

    def waits_for(self) -> Sequence[int]:
        """Return the ranks that this message, or those ahead of it in its lane, wait for."""
        if ahead := self.ahead():
            return sorted({peer for operation in ahead for peer in operation.waits_for()})
        if self.peer == ANY_SOURCE:
            return [rank for rank in self.group if rank != self.rank]
        return (self.peer,)

    def ahead(self) -> Sequence[Pending]:
        """Return the operations that have to be done before this one may start."""
        return self.turn.ahead() if self.turn else []

    @property
    def is_in_batch(self) -> bool:
        """True while the message is part of an unfinished batch."""
        return self.turn is not None and self.turn.is_batch

    @property
    def is_held(self) -> bool:
        """True until the message starts: its rank's earlier operations are not done."""
        return bool(self.ahead())

    def toward(self) -> str:
        """Return a phrase such as ``to rank 2``, ``from itself`` or ``from any rank``."""
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        return f"{PREPOSITIONS[self.name]} {'itself' if self.peer == self.rank else peer}"

    def brief(self) -> str:
        return f"{self.name} {self.toward()}"

    def text(self) -> str:
        """Return text such as ``recv from rank 2, (4,) float32``.

        The tag and the group are included if they are not the default ones.
        """
        toward = PREPOSITIONS[self.name]
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        tag = f", tag {self.tag}" if self.tag else ""
        is_usual = len(self.group) == self.clock.num_ranks
        group = "" if is_usual else f", on the group of {rank_names(self.group)}"
        return f"{self.full_name()} {toward} {peer}, {describe(Form(*self.form))}{tag}{group}"


class Turn:
    """A place in a lane, for a single message or for a batch, whose messages start together.

    Args:
        lane: Stream of one rank. Its turns run one after another; the first is under way.

    Attributes:
        members: Messages of this turn that are not done.
    """

    def __init__(self, lane: "Lane", *, is_batch: bool) -> None:
        self.lane, self.is_batch = lane, is_batch
        self.members: list[Message] = []
        lane.append(self)

    def ahead(self) -> Sequence[Pending]:
        """Return the messages of the lane's first turn; none if this turn is the first."""
        first = self.lane[0]
        return [] if first is self else first.members

    def add(self, message: Message) -> None:
        """Add a message to this turn."""
        self.members.append(message)
        message.turn = self


class StreamTurn(Turn):
    """A place on a GPU's stream, behind operations of any kind."""

    def __init__(self, message: Message, *, is_batch: bool) -> None:
        super().__init__(deque(), is_batch=is_batch)
        self.add(message)

    def ahead(self) -> Sequence[Pending]:
        """Return the operation that has to be done first; none if it is the message itself."""
        first = self.members[0].first()
        return [] if first is self.members[0] else [first]


Lane: TypeAlias = deque[Turn]


class Lanes:
    """The streams of all ranks.

    Args:
        start: Function that starts a message whose turn has come.
    """

    def __init__(self, start: Callable[[Message], None]) -> None:
        self._start = start
        self._lanes: dict[tuple[object, int, int], Lane] = {}
        # For each rank, the number of messages that its batch still lacks, and the batch's turn.
        self._batches: dict[int, tuple[int, Turn | None]] = {}
        self._due: deque[tuple[Turn, float]] = deque()
        self._is_starting = False

    def begin_batch(self, rank: int, num_messages: int) -> None:
        """Make the rank's next ``num_messages`` messages start together."""
        self._batches[rank] = (num_messages, None)

    def enter(self, message: Message) -> bool:
        """Put a message in its lane; return whether it may start now."""
        turn = self._batch_turn(message)
        if turn is None:
            if message.peer == ANY_SOURCE:  # NCCL has no such recv, so none needs a lane
                return True
            turn = Turn(self._lane(message, message.peer), is_batch=False)
        turn.add(message)
        return turn.lane[0] is turn

    def _batch_turn(self, message: Message) -> Turn | None:
        """Return the turn of the batch that the rank is posting, or None outside a batch."""
        num_missing, turn = self._batches.get(message.rank, (0, None))
        if not num_missing:
            return None
        if turn is None or not turn.members:  # the batch has no unfinished message
            turn = Turn(self._lane(message, _BATCHES), is_batch=True)
        self._batches[message.rank] = (num_missing - 1, turn)
        return turn

    def _lane(self, message: Message, peer: int) -> Lane:
        return self._lanes.setdefault((message.key, message.rank, peer), deque())

    def done(self, message: Message, at_s: float) -> None:
        """Start the lane's next turn if this message was the last unfinished one of its turn."""
        turn, message.turn = message.turn, None
        if turn is None:
            return
        turn.members.remove(message)
        if turn.members:
            return
        lane = turn.lane
        lane.popleft()
        if lane:
            self._due.append((lane[0], at_s))
            self._start_due()

    def _start_due(self) -> None:
        """Start due turns in a loop: recursion would be deep if messages are done immediately."""
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._due:
                turn, at_s = self._due.popleft()
                for message in [*turn.members]:
                    message.start(at_s)
                    self._start(message)
        finally:
            self._is_starting = False

    def waiting(self) -> Iterator[Message]:
        """Yield the messages that were posted but have not started."""
        for lane in self._lanes.values():
            for turn in [*lane][1:]:
                yield from turn.members
