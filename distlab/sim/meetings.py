"""Collectives: all ranks of a group meet, the bytes travel phase by phase, all are done.

A collective is recognised by its number: the k-th call of every rank on a group is one meeting.
What must agree is compared as each rank arrives, so a mismatch is reported at the call that
disagrees, before anybody waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from distlab.sim.algorithms import Phase, plan
from distlab.sim.errors import Mismatch
from distlab.sim.pending import Pending, describe

if TYPE_CHECKING:
    from distlab.sim.simulation import Simulation


@dataclass(frozen=True)
class Call:
    """What one rank asks of a collective.

    Attributes:
        name: "all_reduce", as the cost model knows it.
        must_agree: what has to be equal on all ranks, by the word a report uses for it.
        num_bytes: the size that the cost model takes: of the whole buffer, as in the cost formulas.
        inputs, outputs: this rank's tensors.
        move: computes every rank's outputs from all ranks' calls, in group order.
    """

    name: str
    must_agree: dict[str, object]
    num_bytes: int
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    move: "Callable[[Sequence[Call]], None]"
    root: int = 0  # rank inside the group


class Attendance(Pending):
    """One rank's part in a meeting."""

    __slots__ = ("call", "kept", "meeting")

    def __init__(
        self, world: "Simulation", group: tuple[int, ...], call: Call, meeting: "Meeting"
    ) -> None:
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in call.inputs)
        super().__init__(world, call.name, group, num_bytes)
        self.call = call
        self.meeting = meeting
        self.kept: list[Tensor] = []  # strict mode: the inputs as they were when posted

    def waits_for(self) -> Sequence[int]:
        """Return the ranks of the group that have not arrived."""
        return [rank for rank in self.group if rank not in self.meeting.attendances]

    def text(self) -> str:
        """Write ``all_reduce #3 of ranks 0-7, (4,) float32``."""
        tensors = [*self.call.inputs, *self.call.outputs]
        shapes = f", {describe(tensors[0])}" if tensors else ""
        return f"{self.name} #{self.meeting.number} of {_span(self.group)}{shapes}"


class Meeting:
    """One collective call of one group, from the first arrival to the end."""

    def __init__(self, world: "Simulation", group: tuple[int, ...], number: int) -> None:
        self.world = world
        self.group = group
        self.number = number
        self.attendances: dict[int, Attendance] = {}  # by global rank
        self._under_way = 0  # transfers of the current phase

    def arrive(self, call: Call) -> Attendance:
        """Take part as the running rank.

        Raises:
            Mismatch: this call disagrees with that of the rank that came first.
        """
        attendance = Attendance(self.world, self.group, call, self)
        if self.attendances:
            _compare(attendance, next(iter(self.attendances.values())))
        self.attendances[attendance.rank] = attendance
        if self.world.is_strict:
            attendance.kept = [self.world.copied(tensor) for tensor in call.inputs]
        if len(self.attendances) == len(self.group):
            if call.name == "all_to_all":
                _compare_parts([self.attendances[rank] for rank in self.group])
            self._begin(call)
        return attendance

    def _begin(self, call: Call) -> None:
        """Everybody is here: let the bytes travel."""
        world = self.world
        phases = plan(
            call.name, world.algorithm, self.group, call.num_bytes, world.cluster, root=call.root
        )
        self._run_phase(iter(phases), world.scheduler.current.clock_s)

    def _run_phase(self, phases: Iterator[Phase], now_s: float) -> None:
        """Start all transfers of the next phase; the last one to arrive starts the one after."""
        world = self.world
        phase = next(phases, None)
        if phase is None:
            return self._end(now_s)

        def arrived(at_s: float) -> None:
            self._under_way -= 1
            if not self._under_way:
                self._run_phase(phases, at_s)

        self._under_way = len(phase.transfers)
        for src, dst, num_bytes in phase.transfers:
            world.trace.carried(src, dst, num_bytes * phase.repeat, phase.repeat)
            world.traffic.start(src, dst, num_bytes, now_s, arrived, repeat=phase.repeat)
        return None

    def _end(self, at_s: float) -> None:
        world = self.world
        members = [self.attendances[rank] for rank in self.group]
        for member in members:
            for tensor, kept in zip(member.call.inputs, member.kept, strict=False):
                world.check_unchanged(member, tensor, kept)
        with world.unnoticed():
            members[0].call.move([member.call for member in members])
        self.attendances.clear()  # each refers to this meeting: a circle would hold the tensors
        for member in members:
            member.finish(at_s)


def _compare(later: Attendance, first: Attendance) -> None:
    """Raise if two ranks' calls cannot be the same collective."""
    if later.name != first.name:
        reason = "every rank of a group must make the same collective calls in the same order"
    else:
        differing = [
            f"{word} {value} and {first.call.must_agree.get(word)}"
            for word, value in later.call.must_agree.items()
            if value != first.call.must_agree.get(word)
        ]
        if not differing:
            return
        reason = f"they differ in {', '.join(differing)}"
    raise _mismatch(later, first, reason)


def _compare_parts(members: Sequence[Attendance]) -> None:
    """Raise if a rank sends another one more or less than that expects in ``all_to_all``."""
    for i, sender in enumerate(members):
        for k, receiver in enumerate(members):
            sent, expected = sender.call.inputs[k].numel(), receiver.call.outputs[i].numel()
            if sent != expected:
                reason = f"the one sends {sent} elements to the other, which expects {expected}"
                raise _mismatch(sender, receiver, reason)


def _mismatch(one: Attendance, other: Attendance, reason: str) -> Mismatch:
    return Mismatch(
        f"rank {one.rank} {one.text()} at {one.where()},\n"
        f"but rank {other.rank} {other.text()} at {other.where()}: {reason}",
        (one.rank, other.rank),
    )


def _span(group: tuple[int, ...]) -> str:
    if len(group) > 2 and group == tuple(range(group[0], group[-1] + 1)):
        return f"ranks {group[0]}-{group[-1]}"
    return "ranks " + ", ".join(map(str, group))
