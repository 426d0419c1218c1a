"""The process group of the simulated world: every ``torch.distributed`` call ends here."""

# torch's stubs declare overloads for its C++ front; what c10d calls from Python is below.
# mypy: disable-error-code="override,assignment"

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distlab.process_group.base import BaseGroup
from distlab.process_group.call import Call
from distlab.process_group.checks import check_contiguous, check_peer
from distlab.sim.engine.clock import Clock
from distlab.sim.messages.handles import Handles
from distlab.sim.messages.mailbox import Mailbox
from distlab.sim.messages.meetings import Meetings
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE
from distlab.sim.messages.work import SimWork
from distlab.sim.reporting.sites import Places


@dataclass(frozen=True)
class Means:
    """What the groups of a world have in common.

    Attributes:
        clock: of the ranks.
        places: tell where in a program a call was made.
        mailbox: takes messages.
        meetings: take collectives.
        handles: which operations were not waited for.
    """

    clock: Clock
    places: Places
    mailbox: Mailbox
    meetings: Meetings
    handles: Handles


class SimGroup(BaseGroup):
    """One rank's view of a group of simulated ranks.

    Args:
        means: how its messages travel.
        ranks: global numbers, in group order.
        rank: this rank inside the group.
        key: tells groups apart; equal on all ranks that created the same one.
        name: under which torch knows it.
    """

    world_name = "sim"

    def __init__(
        self, means: Means, ranks: tuple[int, ...], rank: int, key: object, name: str
    ) -> None:
        super().__init__(rank, len(ranks), name)
        self._means = means
        self._ranks = ranks
        self._key = key
        self._num_calls = 0

    # Point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> SimWork:
        """Post a send to a rank of the group."""
        check_contiguous("send", tensors)
        check_peer("send", dst, len(self._ranks), self._me)
        means, peer = self._means, self._ranks[dst]
        means.clock.act()
        call = means.places.call_site(sys._getframe(1))
        message = Message(means.clock, "send", self._ranks, tensors[0], peer, self._me, tag, call)
        means.mailbox.send(message, self._key)
        return SimWork(message, tensors, means.handles)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> SimWork:
        """Post a recv from a rank of the group."""
        check_peer("recv", src, len(self._ranks), self._me)
        return self._post_recv(tensors, self._ranks[src], src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimWork:
        """Post a recv from any rank; the first to send is taken, and the lowest of several."""
        return self._post_recv(tensors, ANY_SOURCE, ANY_SOURCE, tag)

    def _post_recv(self, tensors: list[Tensor], peer: int, source: int, tag: int) -> SimWork:
        check_contiguous("recv", tensors)
        means = self._means
        means.clock.act()
        call = means.places.call_site(sys._getframe(2))
        message = Message(means.clock, "recv", self._ranks, tensors[0], peer, source, tag, call)
        means.mailbox.recv(message, self._key)
        return SimWork(message, tensors, means.handles)

    def _take_part(self, call: Call, results: Sequence[Tensor]) -> SimWork:
        means = self._means
        means.clock.act()
        number, self._num_calls = self._num_calls, self._num_calls + 1
        meeting = means.meetings.at(self._key, self._ranks, number)
        attendance = meeting.arrive(call, means.places.call_site(sys._getframe(1)))
        return SimWork(attendance, results, means.handles)
