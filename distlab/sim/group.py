"""The process group of the simulated world: every ``torch.distributed`` call ends here."""

# torch's stubs declare overloads for its C++ front; what c10d calls from Python is below.
# mypy: disable-error-code="override,assignment"

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from distlab.process_group.base import BaseGroup
from distlab.process_group.call import Call
from distlab.process_group.checks import check_contiguous, check_peer
from distlab.sim.mailbox import Message
from distlab.sim.pending import ANY_SOURCE
from distlab.sim.work import SimWork

if TYPE_CHECKING:
    from distlab.sim.simulation import Simulation


class SimGroup(BaseGroup):
    """One rank's view of a group of simulated ranks.

    Args:
        world: the simulation.
        ranks: global numbers, in group order.
        rank: this rank inside the group.
        key: tells groups apart; equal on all ranks that created the same one.
        name: under which torch knows it.
    """

    world_name = "sim"

    def __init__(
        self, world: "Simulation", ranks: tuple[int, ...], rank: int, key: object, name: str
    ) -> None:
        super().__init__(rank, len(ranks), name)
        self._world = world
        self._ranks = ranks
        self._key = key
        self._num_calls = 0

    # Point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> SimWork:
        """Post a send to a rank of the group."""
        check_contiguous("send", tensors)
        check_peer("send", dst, len(self._ranks), self._me)
        self._world.act("send")
        message = Message(
            self._world, "send", self._ranks, tensors[0], self._ranks[dst], self._me, tag
        )
        self._world.mailbox.send(message, self._key)
        return SimWork(message, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> SimWork:
        """Post a recv from a rank of the group."""
        check_peer("recv", src, len(self._ranks), self._me)
        return self._post_recv(tensors, self._ranks[src], src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimWork:
        """Post a recv from any rank; the first to send is taken, and the lowest of several."""
        return self._post_recv(tensors, ANY_SOURCE, ANY_SOURCE, tag)

    def _post_recv(self, tensors: list[Tensor], peer: int, source: int, tag: int) -> SimWork:
        check_contiguous("recv", tensors)
        self._world.act("recv")
        message = Message(self._world, "recv", self._ranks, tensors[0], peer, source, tag)
        self._world.mailbox.recv(message, self._key)
        return SimWork(message, tensors)

    def _take_part(self, call: Call, results: Sequence[Tensor]) -> SimWork:
        self._world.act(call.name)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        meeting = self._world.meeting(self._key, self._ranks, number)
        return SimWork(meeting.arrive(call), results)
