"""Collectives: all ranks of a group arrive, bytes travel phase by phase, and all ranks are done.

A collective is identified by its number: the k-th calls of all ranks on a group form one meeting.
Arguments that must agree are compared as each rank arrives. If they differ, no bytes travel, and
the meeting fails on all ranks: when the last one arrives, or after a while if some do not arrive.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Protocol

from torch import Tensor

from distlab.process_group.call import Call, Form, describe
from distlab.process_group.moves import MOVES, nbytes
from distlab.sim.collectives.phases import Phase
from distlab.sim.engine.clock import Clock
from distlab.sim.messages.disagreement import (
    RankCall,
    device_of,
    disagreement,
    unequal_parts,
    values_of,
)
from distlab.sim.messages.limits import closed_error, patience_error
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import Buffers, Pending
from distlab.sim.messages.shifts import Lines, Splits
from distlab.sim.network.traffic import Traffic
from distlab.sim.reporting.errors import Mismatch
from distlab.sim.reporting.report import Row
from distlab.sim.reporting.sites import CallSite, Places, Site
from distlab.sim.reporting.torch_calls import called_on_some_only
from distlab.util.text import rank_names

FOUNDING = Call("new_group", {}, 0, (), ())
DISPUTE_S = 0.1  # virtual seconds that differing calls wait for the missing ranks
THREADS = (
    "If several threads of a rank use this group, the order of their calls is chance: give each "
    "thread a group of its own."
)
MAX_SHAPES = 6  # maximum number of shapes that a report shows for a coalesced call
Plan = Callable[[Call, tuple[int, ...]], list[Phase]]  # (call, ranks of the group) -> transfers


class Watcher(Protocol):
    """An observer of collective calls, such as the sanitizer."""

    def posted(self, attendance: "Attendance") -> None:
        """Look at a call of the running rank."""

    def met(self, key: object, members: "Sequence[Attendance]") -> None:
        """Look at a call of all ranks of a group, before its tensors change."""

    def sent(self, message: Message) -> None:
        """Look at a message that the running rank posts."""


class Attendance(Pending):
    """One rank's part in a meeting."""

    __slots__ = ("call", "caller", "forms", "kept", "meeting")

    def __init__(self, meeting: "Meeting", call: Call, site: CallSite) -> None:
        super().__init__(meeting.clock, call.name, meeting.group, nbytes(call.inputs), site)
        self.call = call  # deleted at the end, as it holds tensors
        tensors = call.inputs if call.is_coalesced else [*call.inputs, *call.outputs][:1]
        self.forms = [Form(tensor.shape, tensor.dtype) for tensor in tensors]
        self.meeting = meeting
        self.caller = meeting.caller()
        self.kept: list[Tensor] = []  # in strict mode, copies of the inputs as posted

    @property
    def lines(self) -> Lines:
        """The line of the call, and the line that called its function."""
        return self.site, self.caller

    def late(self, limit_s: float) -> Exception:
        """Return the error for a rank whose own limit has expired; the collective continues."""
        return patience_error(self.rank, limit_s, f"{self.text()}, {self.where()}")

    def expired(self, limit_s: float) -> Exception:
        """Make the collective fail on all ranks of the group, and return the error."""
        if self.meeting.is_disputed:
            dispute = self.meeting.dispute()
            self.meeting.fail(partial(_copied, dispute))
            return dispute
        error = super().expired(limit_s)
        self.meeting.close(self.rank)
        return error

    def let_go(self) -> None:
        """Drop the tensors; a handle that is never waited for would keep them alive."""
        self.kept.clear()
        if hasattr(self, "call"):
            del self.call

    def waits_for(self) -> Sequence[int]:
        """Return the ranks of the group that have not arrived."""
        return [rank for rank in self.group if rank not in self.meeting.attendances]

    def title(self) -> str:
        """Return a title such as ``all_reduce (call 3 of ranks 0-7)``."""
        return f"{self.full_name()} (call {self.meeting.number + 1} of {rank_names(self.group)})"

    def text(self) -> str:
        """Return a title and shapes, such as ``all_reduce (call 3 of ranks 0-7), (4,) float32``."""
        shown = [describe(form) for form in self.forms[:MAX_SHAPES]]
        more = ["…"] if len(self.forms) > MAX_SHAPES else []
        return ", ".join([self.title(), *shown, *more])


class Founding(Attendance):
    """One rank's part in creating a group, which exists once all its ranks call ``new_group``."""

    __slots__ = ()
    kind, is_recorded = "founding", False

    def title(self) -> str:
        """Return a title such as ``new_group of ranks 0-3``."""
        return f"new_group of {rank_names(self.group)}"


class Meeting:
    """One collective call of one group, from the arrival of the first rank to the end."""

    # The invariant: the k-th call of every rank on a group attends the group's k-th meeting, which
    # stays in `Meetings._open` until the last rank arrives. Until then, the meeting can fail; ranks
    # that arrive after a failure get its error. Once a meeting has begun, it cannot fail. One that
    # has failed or ended holds no attendances, so no handle keeps the tensors of other ranks alive.

    def __init__(self, world: "Meetings", key: object, group: tuple[int, ...], number: int) -> None:
        self._world, self.clock = world, world.clock
        self.key, self.group, self.number = key, group, number
        self.attendances: dict[int, Attendance] = {}  # by global rank
        self._under_way = 0  # number of unfinished transfers in the current phase
        self._begin_s = 0.0
        self._has_begun = False
        self._error_of: Callable[[int], Exception] | None = None  # set once the meeting has failed
        self.is_disputed = False  # True while calls differ

    def caller(self) -> Site:
        """Return the line that called the function in which the program now calls."""
        return self._world.places.caller()

    def arrive(self, call: Call, site: CallSite) -> Attendance:
        """Attend the meeting as the running rank.

        If calls differ, wait a while for the missing ranks, so that the error can show their calls.

        Raises:
            Mismatch: the ranks' calls cannot form one collective.
        """
        if self._error_of is not None:
            raise self._error_of(self.clock.current.number)
        attendance = self.post(call, site)
        self.join(attendance, attendance.posted_s)
        is_alone = self.is_disputed and not attendance.is_done
        if is_alone and not attendance.block(attendance.posted_s + DISPUTE_S):
            self.fail(partial(_copied, self.dispute()))
        if attendance.error is not None:
            raise attendance.error
        return attendance

    def post(self, call: Call, site: CallSite) -> Attendance:
        """Return the running rank's part, with which it has yet to join."""
        kind = Founding if call is FOUNDING else Attendance
        attendance = kind(self, call, site)
        self._world.splits.count(self.key, attendance.rank, attendance.lines)
        if self._world.watcher is not None:
            self._world.watcher.posted(attendance)
        if self._world.buffers.is_strict:
            attendance.kept = [self._world.buffers.copied(tensor) for tensor in call.inputs]
        return attendance

    def join(self, attendance: Attendance, at_s: float) -> None:
        """Let a rank arrive at a virtual time; the last one to do so starts the collective."""
        self.attendances[attendance.rank] = attendance
        self.is_disputed = self.is_disputed or not self._agrees(attendance)
        if len(self.attendances) == len(self.group):
            self._world.all_here(self)
            self._settle(attendance.call, at_s)

    def _agrees(self, newcomer: Attendance) -> bool:
        call, first = newcomer.call, next(iter(self.attendances.values())).call
        return (
            call.name == first.name
            and call.must_agree == first.must_agree
            and device_of(call) == device_of(first)
        )

    def _settle(self, call: Call, at_s: float) -> None:
        """Now that all ranks have arrived, begin the transfers or fail on all ranks."""
        members = [self.attendances[rank] for rank in self.group]
        error = self.dispute() if self.is_disputed else None
        if error is None and members[0].name == "all_to_all":
            error = unequal_parts([m.call for m in members], [m.row() for m in members])
        if error is None:
            self._begin(call, at_s)
        else:
            self.fail(partial(_copied, error))

    def dispute(self) -> Mismatch:
        """Return the error for differing calls; it shows the calls of ranks that have arrived."""
        present = [self.attendances[rank] for rank in sorted(self.attendances)]
        error = disagreement(
            [
                RankCall(
                    a.rank, a.full_name(), a.maker, values_of(a.call, self.group), self._row(a)
                )
                for a in present
            ]
        )
        if any(map(self._thread, present)) or self._has_several_threads():
            error.args = (f"{error}\n{THREADS}",)
        elif uneven := self._uneven(present):
            is_first = not called_on_some_only({a.rank: a.maker for a in present})
            error.note([uneven] * is_first, [uneven] * (not is_first))
        elif shift := self._world.splits.shift(self.key, ((a.rank, a.lines) for a in present)):
            error.note([shift], ())
        elif waiting := self._waiting_elsewhere(present[0].name):
            error.note([waiting], ())
        return error

    def _uneven(self, present: Sequence[Attendance]) -> str:
        """Return a note if some ranks go through a loop once more while others are past it."""
        are_apart = len({attendance.lines for attendance in present}) > 1
        ranks = [attendance.rank for attendance in present]
        return self._world.splits.uneven(self.key, ranks) if are_apart else ""

    def _waiting_elsewhere(self, name: str) -> str:
        """Return a hint if a rank waits for a present one in such a call on another group."""
        for call in self._blocking_calls():
            awaited = self.attendances.keys() & {*call.waits_for()}
            if call.name == name and call.meeting.key != self.key and awaited:
                return (
                    f"Rank {call.rank} waits for {rank_names(awaited)} in {call.title()}, "
                    f"{call.where()}: is group= missing, or wrong, in the calls of "
                    f"{rank_names(self.attendances)}?"
                )
        return ""

    def _row(self, attendance: Attendance) -> Row:
        row, name = attendance.row(), self._thread(attendance)
        return row._replace(where=f"{row.where}, thread {name!r}") if name else row

    def _thread(self, attendance: Attendance) -> str:
        """Return the name of the thread that made the call; "" for a rank's first thread."""
        current = self.clock.scheduler.current
        newcomer = [current] if attendance.rank == current.number else []
        return next((strand.name for strand in attendance.waiters or newcomer), "")

    def _has_several_threads(self) -> bool:
        """Return whether any rank has more than one thread in a call on this group."""
        users = [call.rank for call in self._blocking_calls() if call.meeting.key == self.key]
        return len({*users}) < len(users)

    def _blocking_calls(self) -> Iterator[Attendance]:
        """Yield the collective calls in which threads wait."""
        for rank in self.clock.scheduler.ranks:
            for strand in rank.strands:
                if isinstance(strand.waits_in, Attendance):
                    yield strand.waits_in

    def close(self, gave_up: int) -> None:
        """Make this collective and all later ones of the group fail, because this one timed out."""
        self._world.closed[self.key] = gave_up
        self.fail(lambda rank: closed_error(rank, gave_up))

    def fail(self, error_of: Callable[[int], Exception]) -> None:
        """Unless the collective has begun, make it fail on all ranks, even on those yet to arrive.

        Args:
            error_of: Function that returns the error for a global rank.
        """
        if self._has_begun:
            return
        self._error_of, self.is_disputed = error_of, False
        now_s = self.clock.current.clock_s
        for rank, attendance in self.attendances.items():
            attendance.fail(error_of(rank), now_s)
        self.attendances.clear()

    def _begin(self, call: Call, at_s: float) -> None:
        """Start the transfers, now that all ranks have arrived."""
        self._has_begun = True
        clock = self.clock
        self._begin_s = at_s
        clock.collective_begins(self.group, self._begin_s)
        if call is FOUNDING:
            clock.scheduler.at(self._begin_s, lambda: self._end(self._begin_s))
        else:
            calls = (attendance.call for attendance in self.attendances.values())
            # Only sparse tensors may differ in size.
            largest = max(calls, key=lambda call: call.num_bytes)
            self._run_phase(iter(self._world.plan(largest, self.group)), self._begin_s)

    def _run_phase(self, phases: Iterator[Phase], now_s: float) -> None:
        """Start all transfers of the next phase; the last arrival starts the phase after that."""
        phase = next(phases, None)
        if phase is None:
            return self._end(now_s)

        def arrived(at_s: float) -> None:
            self._under_way -= 1
            if not self._under_way:
                self._run_phase(phases, at_s)

        self._under_way = len(phase.transfers)
        carry = partial(self._world.traffic.carry, repeat=phase.repeat, latency_s=phase.latency_s)
        on_links = phase.bytes_on_links or repeat(None)
        for (src, dst, num_bytes), carried in zip(phase.transfers, on_links, strict=False):
            carry(src, dst, num_bytes, now_s, arrived, bytes_on_links=carried)
        return None

    def _end(self, at_s: float) -> None:
        self.clock.collective_ends(self.group, at_s)
        members = [self.attendances[rank] for rank in self.group]
        if any(member.lines != members[0].lines for member in members):
            self._world.splits.note(self.key, self.number, {m.rank: m.lines for m in members})
        with self._world.buffers.unnoticed():
            for member in members:
                for tensor, kept in zip(member.call.inputs, member.kept, strict=False):
                    member.check_unchanged(tensor, kept)
            if self._world.watcher is not None:
                self._world.watcher.met(self.key, members)
            if members[0].call is not FOUNDING:
                MOVES[members[0].name]([member.call for member in members])
        self.attendances.clear()  # each refers to this meeting: a cycle would keep tensors alive
        for member in members:
            member.let_go()
            member.finish(at_s)


@dataclass(frozen=True)
class Meetings:
    """All meetings that some rank has yet to attend.

    Args:
        plan: Function that returns the transfers of a call.
        watcher: Observer of all calls, or None.

    Attributes:
        closed: For each closed group, the rank whose collective has timed out.
        splits: Calls that ranks made at different lines.
    """

    clock: Clock
    traffic: Traffic
    buffers: Buffers
    plan: Plan
    places: Places
    watcher: Watcher | None = None
    closed: dict[object, int] = field(default_factory=dict, init=False)
    splits: Splits = field(default_factory=Splits, init=False)
    _open: dict[tuple[object, int], Meeting] = field(default_factory=dict, init=False)

    def at(self, key: object, ranks: tuple[int, ...], number: int) -> Meeting:
        """Return the meeting of a group's ``number``-th collective call.

        Raises:
            RuntimeError: the group is closed, because one of its collectives has timed out.
        """
        if key in self.closed:
            raise closed_error(self.clock.current.number, self.closed[key])
        place = (key, number)
        meeting = self._open.get(place)
        if meeting is None:
            meeting = self._open[place] = Meeting(self, key, ranks, number)
        return meeting

    def all_here(self, meeting: Meeting) -> None:
        """Note that all ranks attend a meeting."""
        self._open.pop((meeting.key, meeting.number), None)

    def abort(self, error: Exception) -> None:
        """Make all collectives fail that some rank has yet to attend, and open all groups."""
        for meeting in [*self._open.values()]:
            meeting.fail(lambda _: error)
        self._open.clear()
        self.closed.clear()

    def begin_run(self) -> None:
        """Forget where ranks called, except in groups whose calls some rank has yet to join."""
        self.splits.forget(but={key for key, _ in self._open})

    def leftovers(self) -> Iterator[Attendance]:
        """Yield the attendances of all meetings that some rank has yet to attend."""
        for meeting in self._open.values():
            yield from meeting.attendances.values()


def _copied(error: Mismatch, _: int) -> Mismatch:
    return copy.copy(error)  # a copy for each rank, which adds its own traceback
