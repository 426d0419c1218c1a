"""Point-to-point messages: a send meets its recv, the bytes travel, both are done.

synchronous (as on NCCL)    send ── waits ──┬ recv posted
                                            └─ α + nβ ─▶ both are done
eager (small, buffered)     send is done ───── α + nβ ─▶ arrived;  recv is done then, or when
                                                         it is posted later
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from torch import Tensor

from distlab.sim.errors import Mismatch
from distlab.sim.pending import Pending, describe

if TYPE_CHECKING:
    from distlab.sim.simulation import Simulation

ANY_SOURCE = -1
Address = tuple[object, int, int, int]  # group, source, destination, tag


class Message(Pending):
    """A posted send or recv. Ranks are global; ``partner`` is the other side, once there is one.

    A pair has one ``number``, the send's.
    """

    __slots__ = (
        *("arrived_s", "is_eager", "number", "partner"),
        *("payload", "peer", "source", "tag", "tensor"),
    )

    def __init__(
        self,
        world: "Simulation",
        name: str,
        group: tuple[int, ...],
        tensor: Tensor,
        peer: int,
        source: int,
        tag: int,
    ) -> None:
        super().__init__(world, name, group, tensor.numel() * tensor.itemsize)
        self.tensor = tensor
        self.peer = peer
        self.number = -1
        self.tag = tag
        self.payload: Tensor | None = None  # the tensor as it was when posted: eager, strict
        self.is_eager = name == "send" and self.num_bytes <= world.eager_bytes
        self.arrived_s: float | None = None
        self.partner: Message | None = None
        self.source = source  # rank inside the group that it comes from

    def waits_for(self) -> Sequence[int]:
        """Return the peer, or every rank that could send."""
        if self.peer == ANY_SOURCE:
            return [rank for rank in self.group if rank != self.rank]
        return (self.peer,)

    def text(self) -> str:
        """Write ``recv from rank 2, (4,) float32``."""
        toward = "to" if self.name == "send" else "from"
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        tag = f", tag {self.tag}" if self.tag else ""
        return f"{self.name} {toward} {peer}, {describe(self.tensor)}{tag}"


class Mailbox:
    """Holds what was posted on one side only, first in first out per address."""

    def __init__(self, world: "Simulation") -> None:
        self._world = world
        self._sends: dict[Address, deque[Message]] = defaultdict(deque)
        self._recvs: dict[Address, deque[Message]] = defaultdict(deque)
        self._numbers = count()

    def send(self, send: Message, group: object) -> None:
        """Post a send.

        Raises:
            Mismatch: the recv that waits for it has another size or dtype.
        """
        world = self._world
        send.number = next(self._numbers)
        if send.is_eager or world.is_strict:
            send.payload = world.copied(send.tensor)
        queues = (
            self._recvs.get((group, send.rank, send.peer, send.tag)),
            self._recvs.get((group, ANY_SOURCE, send.peer, send.tag)),
        )
        recv = _first(*queues)
        if recv is None:
            self._sends[(group, send.rank, send.peer, send.tag)].append(send)
        else:
            self._pair(send, recv, send)
        if send.is_eager or recv:
            self._travel(send)
        if send.is_eager:
            send.finish(send.posted_s)

    def recv(self, recv: Message, group: object) -> None:
        """Post a recv.

        Raises:
            Mismatch: the send that waits for it has another size or dtype.
        """
        if recv.peer == ANY_SOURCE:
            send = _first(self._earliest_to(group, recv.rank, recv.tag))
        else:
            send = _first(self._sends.get((group, recv.peer, recv.rank, recv.tag)))
        if send is None:
            self._recvs[(group, recv.peer, recv.rank, recv.tag)].append(recv)
            return
        self._pair(send, recv, recv)
        if not send.is_eager:
            self._travel(send)
        elif send.arrived_s is not None:
            self._deliver(send, recv, recv.posted_s)

    def _earliest_to(self, group: object, dst: int, tag: int) -> deque[Message] | None:
        queues = [
            queue
            for (of, _, to, with_tag), queue in self._sends.items()
            if queue and (of, to, with_tag) == (group, dst, tag)
        ]
        return min(queues, key=lambda queue: (queue[0].posted_s, queue[0].rank), default=None)

    def _pair(self, send: Message, recv: Message, later: Message) -> None:
        mine, theirs = send.tensor, recv.tensor
        if mine.numel() != theirs.numel() or mine.dtype != theirs.dtype:
            earlier = recv if later is send else send
            raise Mismatch(
                f"rank {later.rank} {later.text()} at {later.where()},\n"
                f"but rank {earlier.rank} {earlier.text()} at {earlier.where()}: "
                "a send and its recv need the same number of elements and the same dtype",
                (later.rank, earlier.rank),
            )
        send.partner, recv.partner = recv, send
        recv.peer, recv.number = send.rank, send.number

    def _travel(self, send: Message) -> None:
        world = self._world
        world.trace.carried(send.rank, send.peer, send.num_bytes, 1)
        start_s = world.scheduler.current.clock_s + world.faults.delay_s(send.rank, send.peer)
        world.traffic.start(
            send.rank, send.peer, send.num_bytes, start_s, lambda at_s: self._arrive(send, at_s)
        )

    def _arrive(self, send: Message, at_s: float) -> None:
        send.arrived_s = at_s
        if send.partner is not None:
            self._deliver(send, send.partner, at_s)

    def _deliver(self, send: Message, recv: Message, at_s: float) -> None:
        world = self._world
        if world.is_strict and send.payload is not None and not send.is_eager:
            world.check_unchanged(send, send.tensor, send.payload)
        payload = send.payload if send.is_eager and send.payload is not None else send.tensor
        world.copy(recv.tensor, payload)
        recv.source = send.source
        send.partner = recv.partner = None  # a circle would hold the tensors
        recv.finish(at_s)
        if not send.is_eager:
            send.finish(at_s)


def _first(*queues: deque[Message] | None) -> Message | None:
    for queue in queues:
        if queue:
            return queue.popleft()
    return None
