"""The order in which NCCL starts point-to-point operations: one after the other in each stream.

What a rank posts to a pair (itself and one peer, on one group) goes to the pair's stream. What it
gives to one ``batch_isend_irecv`` starts together, on the group's stream:

    isend(1); irecv(1)              rank 0 ── 1     send ─▶ recv      the recv starts when the
                                                                      send is done
    batch_isend_irecv([…, …])       rank 0, batches   send
                                                      recv            both start at once
"""

from collections import deque
from collections.abc import Callable, Iterator

from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE

_BATCHES = -2  # where a lane's peer stands


class Lane:
    """What runs one after the other: a stream of one rank. The first turn is under way."""

    def __init__(self, *, is_of_batches: bool) -> None:
        self.is_of_batches = is_of_batches
        self.turns: deque[Turn] = deque()


class Turn:
    """Messages that start together, a single one or a batch, without those that are done."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.members: list[Message] = []
        lane.turns.append(self)

    @property
    def is_batch(self) -> bool:
        """Whether these messages were posted as a batch."""
        return self.lane.is_of_batches

    def ahead(self) -> list[Message]:
        """Return what runs now, if that is another turn."""
        first = self.lane.turns[0]
        return [] if first is self else first.members


class Lanes:
    """All ranks' streams.

    Args: start: posts a message at a time, when its turn has come.
    """

    def __init__(self, start: Callable[[Message], None]) -> None:
        self._start = start
        self._lanes: dict[tuple[object, int, int], Lane] = {}
        self._batches: dict[int, tuple[int, Turn | None]] = {}  # by rank: calls to come, their turn
        self._turns: dict[Message, Turn] = {}
        self._due: deque[tuple[Turn, float]] = deque()
        self._is_starting = False

    def begin_batch(self, rank: int, num_messages: int) -> None:
        """Let the rank's next ``num_messages`` messages start together."""
        self._batches[rank] = (num_messages, None)

    def enter(self, message: Message) -> bool:
        """Put a message in its lane; return whether it may start now."""
        turn = self._batch_turn(message)
        if turn is None:
            if message.peer == ANY_SOURCE:  # NCCL has no such recv to take an order from
                return True
            turn = Turn(self._lane(message, message.peer))
        turn.members.append(message)
        message.turn = self._turns[message] = turn
        return turn.lane.turns[0] is turn

    def _batch_turn(self, message: Message) -> Turn | None:
        """Return the turn of the batch that the message's rank is posting; None: it is not."""
        left, turn = self._batches.get(message.rank, (0, None))
        if not left:
            return None
        if turn is None or not turn.members:  # those before it were done at once
            turn = Turn(self._lane(message, _BATCHES))
        self._batches[message.rank] = (left - 1, turn)
        return turn

    def _lane(self, message: Message, peer: int) -> Lane:
        key = (message.key, message.rank, peer)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(is_of_batches=peer == _BATCHES)
        return lane

    def done(self, message: Message, at_s: float) -> None:
        """Let what comes next in its lane start, if the message was the last of its turn."""
        message.turn, turn = None, self._turns.pop(message, None)
        if turn is None:
            return
        turn.members.remove(message)
        if turn.members:
            return
        turns = turn.lane.turns
        turns.popleft()
        if turns:
            self._due.append((turns[0], at_s))
            self._start_due()

    def _start_due(self) -> None:
        """Start what is due, in a loop, because what starts may be done at once."""
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._due:
                turn, at_s = self._due.popleft()
                for message in [*turn.members]:
                    message.posted_s = at_s
                    self._start(message)
        finally:
            self._is_starting = False

    def waiting(self) -> Iterator[Message]:
        """Yield what was posted and has not started."""
        for lane in self._lanes.values():
            for turn in [*lane.turns][1:]:
                yield from turn.members
