"""Point-to-point messages: a send is matched with a recv, its bytes travel, and both are done.

synchronous (as on NCCL)    send ── waits ──┬ recv posted
                                            └─ α + nβ ─▶ both are done
eager (small, buffered)     send is done ───── α + nβ ─▶ arrived;  recv is done now, or as
                                                         soon as it is posted
"""

import copy
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import chain, count

import torch
from torch import Tensor

from distlab.process_group.call import describe
from distlab.sim.messages.crossings import NO_TAGS, Crossings
from distlab.sim.messages.limits import closed_error
from distlab.sim.messages.message import Communicator, Lanes, Message
from distlab.sim.messages.pending import ANY_SOURCE, Buffers
from distlab.sim.network.traffic import Traffic
from distlab.sim.reporting.report import mismatch
from distlab.sim.reporting.sites import Site

SIZES = "A send and its recv need the same number of elements and the same dtype."
ORDER = "Messages from one rank to another with the same tag meet in the order of the calls."
MAX_TAKEN = 8  # number of messages taken by any-source recvs to remember, per receiver
Pair = tuple[object, int, int]  # (group, lower rank, higher rank)
Address = tuple[object, int, int, int]  # (group, source, destination, tag)
Taken = tuple[object, int, int, tuple[torch.Size, torch.dtype]]  # (group, source, tag, form)


class Mailbox:
    """Matches sends and recvs; for each address, unmatched ones wait in first-in-first-out queues.

    Args:
        eager_bytes: Size of the largest send that is buffered.
        p2p_order: "pair" or "free", as in ``Options``. With "pair", tags do not count.

    Attributes:
        lanes: Streams in which messages wait their turn; None if they start when they are posted.
        closed: For each closed connection, the rank and the message that timed out on it.
        held: Messages that a GPU's stream has yet to get to, as keys.
        crossings: Sends and recvs that met with different tags.
    """

    def __init__(
        self,
        traffic: Traffic,
        buffers: Buffers,
        *,
        eager_bytes: int,
        p2p_order: str,
    ) -> None:
        self._traffic, self._buffers, self._eager_bytes = traffic, buffers, eager_bytes
        self.lanes = Lanes(self._start) if p2p_order == "pair" else None
        self._sends: dict[Address, deque[Message]] = defaultdict(deque)
        self._recvs: dict[Address, deque[Message]] = defaultdict(deque)
        self._has_any_source = False  # True once a recv from any rank has been posted
        self._numbers = count()
        self.closed: dict[Pair, tuple[int, str]] = {}  # rank that timed out, and its message
        self.held: dict[Message, None] = {}
        self.crossings = Crossings()
        # For each receiving rank, messages taken by any-source recvs, with those recvs' sites.
        self._taken: dict[int, deque[tuple[Taken, Site]]] = {}

    def next_number(self) -> int:
        """Return the number of the next send."""
        return next(self._numbers)

    def post(self, message: Message) -> None:
        """Post a send or a recv.

        Raises:
            Mismatch: the other side, which is already waiting, has a different size or dtype.
            RuntimeError: the connection between the two ranks is closed.
        """
        if self.closed:
            self._check_open(message)
        if message.name == "send":
            is_eager = message.num_bytes <= self._eager_bytes
            if is_eager or self._buffers.is_strict:
                message.keep(self._buffers.copied(message.tensor), is_eager=is_eager)
        if self.lanes is None or self.lanes.enter(message):
            self._start(message)

    # The invariant: a message is in a queue only until it is matched. At most one of an address's
    # two queues holds messages, because a new message first tries to take the earliest one from the
    # other queue. An eager send is done as soon as it is posted, even if it is still in a queue,
    # and its bytes leave immediately. The bytes of any other send leave once its recv is posted as
    # well, and both sides are done when the bytes arrive.

    def _start_send(self, send: Message) -> None:
        tag = self._tag(send)
        address = (send.key, send.rank, send.peer, tag)
        recvs = self._recvs.get(address)
        recv = recvs.popleft() if recvs else None
        if recv is None and self._has_any_source:
            recv = _first(self._recvs.get((send.key, ANY_SOURCE, send.peer, tag)))
        if recv is None:
            self._sends[address].append(send)
        else:
            self._pair(send, recv, send)
        if send.is_eager or recv:
            self._travel(send, send.posted_s)
        if send.is_eager:
            send.finish(send.posted_s)
            if self.lanes is not None:
                self.lanes.done(send, send.posted_s)

    def _start(self, message: Message) -> None:
        if message.name == "send":
            self._start_send(message)
        else:
            self._start_recv(message)

    def _start_recv(self, recv: Message) -> None:
        tag = self._tag(recv)
        address = (recv.key, recv.peer, recv.rank, tag)
        if recv.peer == ANY_SOURCE:
            self._has_any_source = True
            send = _first(self._earliest_to(recv.key, recv.rank, tag))
        else:
            sends = self._sends.get(address)
            send = sends.popleft() if sends else None
        if send is None:
            self._recvs[address].append(recv)
            return
        self._pair(send, recv, recv)
        if not send.is_eager:
            self._travel(send, recv.posted_s)
        elif send.arrived_s is not None:
            self.deliver(send, recv, recv.posted_s)

    def _tag(self, message: Message) -> int:
        """Return the tag by which a message is matched: with NCCL, all have the same."""
        is_of_nccl = self.lanes is not None or isinstance(message.key, Communicator)
        return 0 if is_of_nccl else message.tag

    def close(self, late: Message) -> None:
        """Close the connection that ``late`` uses, as gloo does when a wait times out.

        Unmatched messages that have started on the connection fail; so do messages posted later.
        """
        pair = _pair_of(late)
        self.closed[pair] = timed_out = late.rank, f"{late.text()}, {late.where()}"
        now_s = late.clock.current.clock_s
        for queue in (*self._sends.values(), *self._recvs.values()):
            for message in [m for m in queue if _pair_of(m) == pair]:
                queue.remove(message)
                if message is not late:
                    message.fail(closed_error(message.rank, *timed_out), now_s)

    def _check_open(self, message: Message) -> None:
        timed_out = self.closed.get(_pair_of(message))
        if timed_out is not None:
            message.clock.refused(message)
            raise closed_error(message.rank, *timed_out)

    def is_open(self, key: object, rank: int, peer: int) -> bool:
        """Return whether messages can pass between two ranks."""
        return (key, min(rank, peer), max(rank, peer)) not in self.closed

    def why_closed(self, message: Message) -> str:
        """Return which rank closed the message's connection, and why; "" while it is open."""
        timed_out = self.closed.get(_pair_of(message))
        return "rank {} had waited long enough in its {}".format(*timed_out) if timed_out else ""

    def abort(self, error: Exception, at_s: float) -> None:
        """Make all messages fail that have no other side yet, and open all connections."""
        for message in [*self.unmatched(), *self.waiting()]:
            message.turn = None
            message.fail(error, at_s)
        for kept in (self._sends, self._recvs, self.held, self.closed):
            kept.clear()
        if self.lanes is not None:
            self.lanes = Lanes(self._start)

    def begin_run(self) -> None:
        """Forget which messages the recvs from any rank have taken."""
        self._taken.clear()

    def taken_at(self, recv: Message) -> Site | None:
        """Return where an any-source recv took a message that would fit ``recv``, or None."""
        wanted = (recv.key, recv.peer, recv.tag, recv.form)
        taken = self._taken.get(recv.rank, ())
        return next((site for message, site in reversed(taken) if message == wanted), None)

    def unmatched(self) -> Iterator[Message]:
        """Yield the messages that have started but are still unmatched."""
        return chain.from_iterable((*self._sends.values(), *self._recvs.values()))

    def waiting(self) -> Iterator[Message]:
        """Yield the messages that were posted but have not started."""
        return iter(self.held) if self.lanes is None else self.lanes.waiting()

    def _earliest_to(self, group: object, dst: int, tag: int) -> deque[Message] | None:
        queues = [
            queue
            for (of, _, to, with_tag), queue in self._sends.items()
            if queue and (of, to, with_tag) == (group, dst, tag)
        ]
        return min(queues, key=lambda queue: (queue[0].posted_s, queue[0].rank), default=None)

    def _pair(self, send: Message, recv: Message, later: Message) -> None:
        if send.tag != recv.tag:
            self.crossings.note(send, recv)
        if send.form != recv.form and not _fit(send.tensor, recv.tensor):
            earlier = recv if later is send else send
            order = ORDER if send.tag == recv.tag else NO_TAGS
            error = mismatch(
                "shape or dtype mismatch",
                f"rank {send.rank} sends {describe(send.tensor)}, and rank {recv.rank} receives "
                f"{describe(recv.tensor)}",
                [earlier.row(), later.row()],
                f"{SIZES} {self._swapped_tag(send, recv, later) or order}",
            )
            # Both ranks raise this error, and each adds its own traceback, so one gets a copy.
            earlier.fail(copy.copy(error), later.posted_s)
            raise error
        if recv.peer == ANY_SOURCE:
            taken = self._taken.setdefault(recv.rank, deque(maxlen=MAX_TAKEN))
            taken.append(((recv.key, send.rank, recv.tag, recv.form), recv.site))
        send.meet(recv)

    def _swapped_tag(self, send: Message, recv: Message, later: Message) -> str:
        """Return a hint about swapped tags if a message with another tag would fit; else ""."""
        queues = self._sends if later is recv else self._recvs
        for (key, src, dst, tag), queue in queues.items():
            is_near = (key, src, dst) == (send.key, send.rank, recv.rank) and tag != self._tag(send)
            if is_near and queue and _fit(queue[0].tensor, later.tensor):
                whose = f"rank {queue[0].rank}'s {queue[0].name} with tag {tag}"
                return f"But {whose} has {describe(queue[0].tensor)}: are the tags swapped?"
        return ""

    def _travel(self, send: Message, start_s: float) -> None:
        self._traffic.carry(send.rank, send.peer, send.num_bytes, start_s, send.arrive)

    def deliver(self, send: Message, recv: Message, at_s: float) -> None:
        """Copy the sent data into the recv's tensor, and finish both sides."""
        payload = send.tensor
        if send.payload is not None:  # the send is eager, or the mode is strict
            if send.is_eager:
                payload = send.payload
            else:
                with self._buffers.unnoticed():
                    send.check_unchanged(payload, send.payload)
        self._buffers.copy(recv.tensor, payload)
        recv.release(send.source)
        send.release(send.source)
        recv.finish(at_s)
        if not send.is_eager:
            send.finish(at_s)
        if self.lanes is not None:
            self.lanes.done(recv, at_s)
            self.lanes.done(send, at_s)


def _pair_of(message: Message) -> Pair:
    return message.key, min(message.rank, message.peer), max(message.rank, message.peer)


def _fit(x: Tensor, y: Tensor) -> bool:
    return x.numel() == y.numel() and x.dtype == y.dtype


def _first(queue: deque[Message] | None) -> Message | None:
    return queue.popleft() if queue else None
