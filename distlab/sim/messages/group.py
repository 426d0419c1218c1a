"""The process group of the simulated world: every ``torch.distributed`` call ends up here."""

# torch's stubs declare overloads of the C++ class; c10d calls only the methods below from Python.
# mypy: disable-error-code="override,assignment"

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from distlab.process_group.base import BaseGroup
from distlab.process_group.call import Call
from distlab.process_group.checks import check_contiguous, check_peer
from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import NEVER
from distlab.sim.messages.limits import missing_error, seconds_of, unmonitored_error
from distlab.sim.messages.mailbox import Mailbox
from distlab.sim.messages.meetings import Attendance, Meeting, Meetings
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE
from distlab.sim.messages.work import Handles, SimWork, work_of
from distlab.sim.reporting.errors import Mismatch, SimulationError
from distlab.sim.reporting.sites import Places

MONITORED = Call("monitored_barrier", {}, 0, (), ())
MAX_ERRORS = 1_000


class Failures:
    """Keeps a world's first error.

    Args:
        explain: Function that adds notes to an error; called before any rank continues.
        stop: Function that ends the world with a given error.

    Attributes:
        first: First error, which is the one to report; None if there was none.
    """

    def __init__(
        self,
        explain: Callable[[SimulationError], SimulationError],
        stop: Callable[[BaseException], None],
    ) -> None:
        self._explain, self._stop = explain, stop
        self._num_errors = 0
        self.first: SimulationError | None = None

    def forget(self) -> None:
        """Begin anew, after the first error has been reported."""
        self._num_errors, self.first = 0, None

    def note(self, error: SimulationError) -> None:
        """Count an error that is about to be raised in the running rank; keep the first error.

        More than MAX_ERRORS errors end the world, because a rank that catches its errors might
        retry forever.
        """
        self._num_errors += 1
        if self.first is None:
            self.first = self._explain(error)
        if self._num_errors > MAX_ERRORS:
            self._stop(self.first)


@dataclass(frozen=True)
class Shared:
    """Parts of a world that all its groups share.

    Attributes:
        handles: Operations whose handles have not been waited for.
        failures: Record of errors from calls that do not match.
    """

    clock: Clock
    places: Places
    mailbox: Mailbox
    meetings: Meetings
    handles: Handles
    failures: Failures


class SimGroup(BaseGroup):
    """One rank's view of a group of simulated ranks.

    Args:
        shared: Parts of the world that all groups use.
        ranks: Global ranks of the members, in group order.
        rank: Number of this rank inside the group.
        key: Identity of the group, which is the same on all its ranks.
        name: Name under which torch knows the group.
        limit_s: Time limit of each operation, in virtual seconds.
    """

    world_name = "sim"
    adds_sparse = True
    has_uneven_reduce_scatter = True

    def __init__(
        self,
        shared: Shared,
        ranks: tuple[int, ...],
        rank: int,
        key: object,
        name: str,
        limit_s: float = NEVER,
    ) -> None:
        super().__init__(rank, len(ranks), name)
        self._shared = shared
        self._ranks = ranks
        self._key = key
        self._limit_s = limit_s
        self._num_calls = 0

    @property
    def place(self) -> tuple[object, int]:
        """Identity of the group, and the number of its collective calls on this rank."""
        return self._key, self._num_calls

    def skip_to(self, num_calls: int) -> None:
        """Count collective calls of which this rank has left some out."""
        self._num_calls = num_calls

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group can send; asynchronous checkpoints require ``cpu``."""
        return [torch.device(name) for name in ("cpu", "cuda", "meta")]

    supports_splitting = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: the group has no memory of its own."""
        return False

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries tensors of a device: a group is its own backend.

        Raises:
            RuntimeError: The group carries none; the text is torch's.
        """
        if torch.device(device.type) not in self._device_types:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    # Point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> SimWork:
        """Post a send to a rank of the group."""
        check_contiguous("send", tensors)
        if not 0 <= dst < self._num_ranks:
            check_peer("send", dst, self._num_ranks, self._me)
        return self._post("send", tensors, self._ranks[dst], self._me, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> SimWork:
        """Post a recv from a rank of the group."""
        if not 0 <= src < self._num_ranks:
            check_peer("recv", src, self._num_ranks, self._me)
        check_contiguous("recv", tensors)
        return self._post("recv", tensors, self._ranks[src], src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimWork:
        """Post a recv from any rank; it takes the earliest send, and ties go to the lowest rank."""
        check_contiguous("recv", tensors)
        return self._post("recv", tensors, ANY_SOURCE, ANY_SOURCE, tag)

    def _post(self, name: str, tensors: list[Tensor], peer: int, source: int, tag: int) -> SimWork:
        shared = self._shared
        clock, mailbox = shared.clock, shared.mailbox
        if mailbox.closed:
            self._act(peer)
        else:
            clock.act()
        ranks, call = self._ranks, shared.places.call_site()
        message = Message(
            clock, name, ranks, tensors[0], peer, source, tag, call, self._key, mailbox
        )
        if shared.meetings.watcher is not None:
            shared.meetings.watcher.sent(message)
        try:
            mailbox.post(message)
        except Mismatch as error:
            shared.failures.note(error)
            raise
        return work_of(message, tensors, shared.handles, self._limit_s)

    def _act(self, peer: int) -> None:
        is_open = self._shared.mailbox.is_open(self._key, self._ranks[self._me], peer)
        self._shared.clock.act(is_progress=is_open)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; rank 0 of the group reports ranks that do not arrive in time.

        Args:
            timeout: Time limit on rank 0; None for the time limit of the group.
            wait_all_ranks: True to report all missing ranks, not only the first.

        Raises:
            RuntimeError: some ranks did not arrive in time; raised on all ranks that did.
        """
        self.counts.add(MONITORED)
        attendance = self._attend(MONITORED)
        if self._me == 0:
            limit_s = self._limit_s if timeout is None else seconds_of(timeout)
            self._monitor(attendance, limit_s, names_all=wait_all_ranks)
        attendance.wait()

    def _monitor(self, attendance: Attendance, limit_s: float, *, names_all: bool) -> None:
        until_s = self._shared.clock.current.clock_s + limit_s
        if limit_s and attendance.block(until_s):
            return
        self._shared.clock.gave_up(attendance)
        missing = [self._ranks.index(rank) for rank in attendance.waits_for()]
        attendance.meeting.fail(lambda rank: unmonitored_error(self._ranks.index(rank)))
        raise missing_error(missing if names_all else missing[:1], limit_s)

    def _take_part(self, call: Call, results: Sequence[Tensor]) -> SimWork:
        return work_of(self._attend(call), results, self._shared.handles, self._limit_s)

    def _attend(self, call: Call) -> Attendance:
        shared = self._shared
        shared.clock.act(is_progress=shared.clock.current.patience.tried is None)
        if self._key in shared.meetings.closed:
            self._refused(call)
        meeting = shared.meetings.at(self._key, self._ranks, self._num_calls)
        self._num_calls += 1
        try:
            return meeting.arrive(call, shared.places.call_site())
        except Mismatch as error:
            shared.failures.note(error)
            raise

    def _refused(self, call: Call) -> None:
        """Charge virtual time for a call that will be refused because its group is closed."""
        shared = self._shared
        meeting = Meeting(shared.meetings, self._key, self._ranks, self._num_calls)
        attendance = Attendance(meeting, call, shared.places.call_site())
        meeting.attendances[attendance.rank] = attendance
        shared.clock.refused(attendance)
