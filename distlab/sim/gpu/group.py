"""A process group whose collectives and messages run on streams of the GPUs, as on NCCL."""

# torch's stubs declare overloads of the C++ class; c10d calls only the methods below from Python.
# mypy: disable-error-code="override,assignment"

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import Work

from distlab.process_group.call import Call
from distlab.process_group.checks import check_contiguous, check_own_part
from distlab.process_group.moves import alike, nbytes
from distlab.sim.engine.scheduler import NEVER
from distlab.sim.gpu import report
from distlab.sim.gpu.adoption import made_for_gpu
from distlab.sim.gpu.backend import NcclOptions, ProcessGroupNCCL
from distlab.sim.gpu.communicators import Choice, Communicators
from distlab.sim.gpu.device import HostAndGpus, this_device
from distlab.sim.gpu.flight_recorder import (
    TIMEOUT_S,
    UNCHECKED,
    FlightRecorder,
    GroupInfo,
    minutes,
    write_dumps,
)
from distlab.sim.gpu.hazards import too_late
from distlab.sim.gpu.orders import Orders
from distlab.sim.gpu.placement import home_of, index_of
from distlab.sim.gpu.streams import Mark, Stream
from distlab.sim.messages.crossings import Crossings
from distlab.sim.messages.group import Shared, SimGroup
from distlab.sim.messages.limits import seconds_of
from distlab.sim.messages.meetings import DISPUTE_S, Attendance, Meeting
from distlab.sim.messages.message import Communicator, Message, StreamTurn
from distlab.sim.messages.pending import Pending
from distlab.sim.messages.work import Handles, SimWork, work_of
from distlab.sim.reporting.errors import Mismatch
from distlab.sim.reporting.sites import CallSite, Site
from distlab.sim.results.gpu_time import GpuTime, OnTrack

Uses = list[tuple[Tensor, bool]]  # tensors of a call, each with True if it is written


@dataclass
class Batch:
    """The messages of one ``batch_isend_irecv`` that a rank is posting.

    Attributes:
        missing: Number of messages that are still to come.
    """

    missing: int
    messages: list[Message] = field(default_factory=list)
    uses: Uses = field(default_factory=list)


@dataclass
class Block:
    """The calls inside one of torch's blocks of coalesced calls, with one handle for all."""

    works: "list[GpuWork]" = field(default_factory=list)

    def wait(self) -> bool:
        """Make the current stream wait for all of them."""
        for work in self.works:
            work.wait()
        return True


@dataclass
class Fleet:
    """The GPUs of all ranks.

    Attributes:
        devices: Host and GPUs of each rank.
        places: (node, number on it) of the GPU of each rank.
        batches: The batch that each rank is posting.
        crossings: Messages that met with different tags.
        recorders: Flight recorder of each rank; none without a watchdog.
        watchdog: Folder for the dumps of flight recorders after a hang, or None.
        timeouts_s: Time after which torch's watchdog ends an operation, by key of its group.
        launched: Operations on streams that are not done, as keys.
    """

    devices: Sequence[HostAndGpus]
    places: Sequence[tuple[int, int]]
    communicators: Communicators = field(default_factory=Communicators)
    batches: dict[int, Batch] = field(default_factory=dict)
    channels: dict[tuple[int, int, Communicator], Stream] = field(default_factory=dict)
    crossings: Crossings = field(default_factory=Crossings)
    recorders: dict[int, FlightRecorder] = field(default_factory=dict)
    watchdog: Path | None = None
    timeouts_s: dict[object, float] = field(default_factory=dict)
    launched: dict[Pending, None] = field(default_factory=dict)

    def begin_batch(self, rank: int, num_messages: int) -> None:
        """Make the rank's next messages start together."""
        self.batches[rank] = Batch(num_messages)

    def abort(self, at_s: float) -> None:
        """End all operations on streams, and forget in which order ranks have begun them."""
        for pending in [*self.launched]:
            pending.abandon(at_s)
        self.launched.clear()
        self.batches.clear()
        self.communicators.orders = Orders()

    def after_hang(self, text: str, pendings: Iterable[Pending]) -> list[str]:
        """Return lines on what happens on GPUs now: a text or, with a watchdog, on its dumps.

        Args:
            text: Text with a place for the time after which the watchdog ends the ranks.
            pendings: Operations of which the first that is late ends them.
        """
        if self.watchdog is None:
            timeouts_s = (self.timeouts_s.get(_group_of(p), TIMEOUT_S) for p in pendings)
            return [text.format(minutes(min(timeouts_s, default=TIMEOUT_S)))]
        ranks = self.devices[0].clock.scheduler.ranks
        gone = [rank.number for rank in ranks if rank.has_left]
        return write_dumps(self.recorders, gone, self.watchdog)

    def wrong(self, *, has_ended: bool) -> list[str]:
        """Return a line for each wrong use, of memory, communicators or tags.

        Args:
            has_ended: True if the world has ended without an error, so nothing more is to come.
        """
        nodes = [node for node, _ in self.places]
        found = report.wrong(self.devices, nodes, has_ended=has_ended)
        of_communicators = self.communicators.findings(has_ended=has_ended)
        return [*found, *of_communicators, *self.crossings.changed_places()]

    def gpu_time(self) -> GpuTime:
        """Return where the time went, and what was wrong."""
        return report.gpu_time(self.devices, self.wrong(has_ended=True))

    def take_tracks(self, until_s: float) -> list[OnTrack]:
        """Return the work of all streams as far as it is known, and forget what has ended."""
        tracks = report.tracks(self.devices)
        for device in self.devices:
            device.usage.forget_tracks(until_s)
        return tracks


def _group_of(pending: Pending) -> object:
    """Return the key of the group of an operation."""
    if isinstance(pending, Attendance):
        return pending.meeting.key
    key = pending.key if isinstance(pending, Message) else None
    return key.group if isinstance(key, Communicator) else key


class GpuGroup(SimGroup):
    """One rank's view of a group of ranks with GPUs.

    Tensors of the host travel as on gloo if the group has that backend.

    Args:
        fleet: GPUs of all ranks.
        backend: Name that the program gave: "nccl", "gloo" or "" for both.
        bound: Number of the GPU of a ``device_id``, because of which the communicator exists from
            the start; -1 without one.
        options: NCCL's options that the program gave, or None.
        watchdog: Timeout that the program gave, after which torch's watchdog ends the ranks, or
            None.
    """

    def __init__(
        self,
        shared: Shared,
        ranks: tuple[int, ...],
        rank: int,
        key: object,
        name: str,
        limit_s: float = NEVER,
        *,
        fleet: Fleet,
        backend: str = "",
        bound: int = -1,
        options: NcclOptions | None = None,
        watchdog: timedelta | None = None,
    ) -> None:
        super().__init__(shared, ranks, rank, key, name, limit_s)
        self._fleet, self.backend, self.bound = fleet, backend, bound
        self._used: set[int] = set()  # GPUs of the calls so far
        self._device = fleet.devices[ranks[rank]]
        self._recorder = fleet.recorders.get(ranks[rank])
        self._info = GroupInfo(name, ranks, seconds_of(watchdog) if watchdog else limit_s)
        fleet.timeouts_s[key] = self._info.timeout_s
        self._options = options
        self._block: Block | None = None
        self._late_until_s = 0.0  # end of the last operation that outlasted the timeout

    @property
    def _device_types(self) -> list[torch.device]:
        names = {"nccl": ["cuda"], "gloo": ["cpu", "cuda"]}.get(self.backend, ["cpu", "cuda"])
        return [torch.device(name) for name in names]

    @cached_property
    def _nccl(self) -> ProcessGroupNCCL:
        timeout = timedelta(seconds=self._info.timeout_s)
        return ProcessGroupNCCL(self, self._options, timeout)

    def _get_backend(self, device: torch.device) -> Any:
        """Return NCCL's part of the group or, for tensors of the host and on gloo, the group."""
        own = super()._get_backend(device)
        return own if device.type == "cpu" or self.backend == "gloo" else self._nccl

    def limit(self, timeout: timedelta) -> None:
        """Set the time limit of later operations."""
        self._limit_s = seconds_of(timeout)
        self._info = self._info._replace(limit_s=self._limit_s)
        self._fleet.timeouts_s[self._key] = self._limit_s

    def is_for_nccl(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether NCCL alone takes these tensors: they are on a GPU, or must be."""
        is_on_gpu = any(index_of(x) >= 0 for x in tensors)  # torch may have made the others
        return self.backend == "nccl" or (self.backend != "gloo" and is_on_gpu)

    # Where a call runs

    def _place(self, name: str, tensors: Sequence[Tensor], *, is_by_torch: bool) -> int:
        """Return the GPU on which a call runs; -1 for the host.

        Raises:
            RuntimeError: No backend of the group takes the tensors; the text is torch's.
        """
        indices = [index_of(tensor) for tensor in tensors]
        index = max(indices, default=-1)
        if index < 0 and is_by_torch:  # C++ code may have made the tensors beside those of the GPU
            index = self._device.running
        if index < 0 and is_by_torch and self.backend == "nccl":
            index = made_for_gpu(-1)
        if index < 0 and self.backend == "nccl" and tensors and not tensors[0].is_meta:
            raise RuntimeError(
                f"{name}: No backend type associated with device type cpu. The group is NCCL's, "
                "which takes tensors of GPUs only: move it there, or let gloo take those of the "
                'host, by init_process_group("cpu:gloo,cuda:nccl")'
            )
        if index >= 0:
            for tensor in [t for t, i in zip(tensors, indices, strict=True) if i < 0]:
                self._move_in(name, tensor, index, is_by_torch=is_by_torch)
        return index

    def _move_in(self, name: str, tensor: Tensor, index: int, *, is_by_torch: bool) -> None:
        """Note that a tensor that torch's C++ code has made is on a GPU."""
        if not is_by_torch and tensor.numel():
            raise RuntimeError(
                f"{name}: Tensors must be CUDA and dense: one is on cuda:{index}, another on the "
                "CPU"
            )
        self._device.adopt(tensor, self._device.current_stream(index))

    def _channel(self, key: Communicator, index: int) -> Stream:
        """Return the communicator's stream on one of the rank's GPUs."""
        channels, place = self._fleet.channels, (self._rank, index, key)
        if place not in channels:
            channels[place] = self._device.new_stream("NCCL's stream", index)
        return channels[place]

    @property
    def _rank(self) -> int:
        return self._ranks[self._me]

    def _join_communicator(
        self, key: Communicator, index: int, operation: Pending, *, is_batch: bool
    ) -> None:
        members = key.pair or self._ranks
        fleet, (node, local_rank) = self._fleet, self._fleet.places[self._rank]
        gpu, chosen = self._device.visible()[index], self._device.chosen_at.get(index)
        choice = Choice(index, chosen, local_rank) if chosen and gpu != local_rank else None
        number = operation.meeting.number if isinstance(operation, Attendance) else None
        self._used.add(index)
        fleet.communicators.check_place(key, number, self._rank, members, (node, gpu), choice)
        fleet.communicators.used(
            key,
            members,
            operation,
            self._device.host.reached,
            is_batch=is_batch,
            is_eager=self.bound >= 0,
        )

    # Collectives

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks, which on NCCL sum a number on a GPU of each."""
        index = self._gpu_of_barrier(opts)
        self._device.begin_use(index)
        with self._device.running_on(index):
            return super().barrier(opts)

    def _gpu_of_barrier(self, opts: Any) -> int:
        """Return the GPU that torch's C++ code chooses; the thread's current one plays no part."""
        if opts is not None and opts.device_ids:
            return int(opts.device_ids[0])
        if self.bound >= 0:
            return self.bound
        return min(self._used, default=self._rank % self._device.num_gpus)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Give every rank the tensors of all ranks, on NCCL also those of different sizes.

        NCCL knows numbers of elements, so a number may arrive in a tensor of shape (1,).
        """
        parts = outputs[0]
        if self.backend == "gloo" or min(map(index_of, parts)) < 0:
            return super().allgather(outputs, inputs, opts)
        if len(parts) == self.size():
            inputs = [_as_number(inputs[0], parts[self._me])]
        if len({part.shape for part in parts}) < 2:
            return super().allgather(outputs, inputs, opts)
        check_own_part("all_gather", parts, self.size(), self._me, inputs[0], "input")
        check_contiguous("all_gather", [*inputs, *parts])
        must_agree = {**alike(inputs), "size": [part.numel() for part in parts]}
        return self._meet(Call("all_gather", must_agree, nbytes(parts), inputs, parts))

    def _take_part(self, call: Call, results: Sequence[Tensor]) -> SimWork:
        site = self._shared.places.call_site()
        call = replace(call, outputs=[_unversioned(output) for output in call.outputs])
        tensors = [*call.inputs, *call.outputs]
        if call.name == "barrier" and self.backend != "gloo":
            index = self._device.running
            self._device.is_used = True
        else:
            index = self._place(call.name, tensors, is_by_torch=site[1])
        uses = [*((t, False) for t in call.inputs), *((t, True) for t in call.outputs)]
        if index < 0 or self.backend == "gloo":
            self._use_on_host(call.name, uses)
            return super()._take_part(call, results)
        self._device.clock.advance(self._device.costs.communication_launch_s)
        meeting, attendance = self._posted(call, site)
        if self._recorder:
            self._recorder.collective(self._info, attendance, call)
        key = Communicator(self._key)
        self._join_communicator(key, index, attendance, is_batch=False)
        channel = self._channel(key, index)
        go = partial(self._arrive, meeting, attendance)
        end = self._launch(channel, [attendance], uses, attendance.title(), site, go)
        reached = self._device.current_stream(index).reached
        self._fleet.communicators.orders.launched(
            attendance, key, attendance.meeting.number, channel, reached
        )
        kind = BarrierWork if call.name == "barrier" else GpuWork
        work = work_of(attendance, results, Handles(), self._limit_s, kind)
        work.end = end
        return self._noted_in_block(work)

    def _noted_in_block(self, work: "GpuWork") -> "GpuWork":
        if self._block is not None:
            self._block.works.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._block = Block()

    def _end_coalescing(self, device: torch.device) -> "Block | None":
        """Return the handle of all calls since the start."""
        block, self._block = self._block, None
        return block

    def _use_on_host(self, name: str, uses: Uses) -> None:
        """Let gloo use tensors: it waits for those of a GPU, and takes the host's as they are."""
        device = self._device
        if any(index_of(tensor) >= 0 for tensor, _ in uses):
            device.sync("gloo's copy to the host", None, self._shared.places.call_site()[0])
        for tensor, is_write in uses:
            home = home_of(tensor)
            if home is not None and home.index < 0 and home.accesses:
                device.host_uses(tensor, home, name, is_write=is_write)

    def _posted(self, call: Call, site: CallSite) -> tuple[Meeting, Attendance]:
        shared = self._shared
        shared.clock.act()
        meeting = shared.meetings.at(self._key, self._ranks, self._num_calls)
        self._num_calls += 1
        return meeting, meeting.post(call, site)

    def _arrive(self, meeting: Meeting, attendance: Attendance, at_s: float) -> None:
        """Join a collective when the stream gets to it; calls that differ end the world."""
        attendance.posted_s = at_s
        meeting.join(attendance, at_s)
        if attendance.error is not None:
            raise self._noted(attendance.error, attendance)
        if meeting.is_disputed:
            dispute = partial(self._dispute, meeting, attendance)
            self._shared.clock.scheduler.at(at_s + DISPUTE_S, dispute)

    def _dispute(self, meeting: Meeting, attendance: Attendance) -> None:
        if meeting.is_disputed:
            raise self._noted(meeting.dispute(), attendance)

    def _noted(self, error: Exception, pending: Pending) -> Exception:
        if isinstance(error, Mismatch):
            error.note((), self._fleet.after_hang(UNCHECKED, [pending]))
            self._shared.failures.note(error)
        return error

    def _launch(
        self,
        channel: Stream,
        pendings: Sequence[Pending],
        uses: Uses,
        text: str,
        site: CallSite,
        go: Callable[[float], None],
    ) -> Mark:
        """Put communication on a stream; call ``go`` with the time when the stream gets to it."""
        device, scheduler = self._device, self._shared.clock.scheduler
        rank = scheduler.ranks[self._rank]
        start, end = device.launch_communication(channel, pendings, uses, text, site[0])
        for pending in pendings:
            pending.behind = tuple(p for p in start.after if isinstance(p, Pending))
            pending.then(partial(self._note_if_late, pending, device.host_s(), text, site[0]))
            pending.then(partial(self._fleet.launched.pop, pending, None))
        self._fleet.launched.update(dict.fromkeys(pendings))

        def begin(at_s: float) -> None:
            if not rank.is_killed and not pendings[0].is_done:
                go(max(at_s, scheduler.now_s))

        def schedule(at_s: float) -> None:
            at_s = max(at_s, scheduler.now_s)
            scheduler.at(at_s, partial(begin, at_s))

        start.when_known(schedule)
        return end

    def _note_if_late(self, pending: Pending, launched_s: float, text: str, site: Site) -> None:
        took_s, timeout_s = pending.done_s - launched_s, self._info.timeout_s
        is_first = launched_s >= self._late_until_s  # those queued behind it are late as well
        if took_s > timeout_s and is_first and pending.error is None:
            self._late_until_s = pending.done_s
            self._device.hazards.add(too_late(text, took_s, minutes(timeout_s), site))

    # Messages

    def _post(
        self, name: str, tensors: list[Tensor], peer: int, source: int, tag: int
    ) -> SimWork | None:
        site = self._shared.places.call_site()
        index = self._place(name, tensors, is_by_torch=site[1])
        batch = self._fleet.batches.get(self._rank)
        if index < 0 or self.backend == "gloo":
            self._use_on_host(name, [(tensor, name == "recv") for tensor in tensors])
            return super()._post(name, tensors, peer, source, tag)
        if peer < 0:
            raise RuntimeError(f"ProcessGroupNCCL does not support {name} from any source")
        key = Communicator(self._key)
        if batch is None and self.bound < 0:
            key = Communicator(self._key, (min(self._rank, peer), max(self._rank, peer)))
        if batch is None:
            self._device.clock.advance(self._device.costs.communication_launch_s)
        self._shared.clock.act()
        message = self._message(name, tensors[0], peer, source, tag, site, key)
        self._join_communicator(key, index, message, is_batch=batch is not None)
        if self._shared.meetings.watcher is not None:
            self._shared.meetings.watcher.sent(message)
        message.turn = StreamTurn(message, is_batch=batch is not None)
        self._shared.mailbox.held[message] = None
        if self._recorder:
            self._recorder.message(
                self._info, message, is_numbered=batch is None or not batch.messages
            )
        uses = [(tensors[0], name == "recv")]
        channel = self._channel(key, index)
        if batch is not None:
            return self._add(batch, channel, message, uses, site)
        work = work_of(message, tensors, Handles(), self._limit_s, GpuWork)
        go = partial(self._send, [message])
        work.end = self._launch(channel, [message], uses, message.text(), site, go)
        return self._noted_in_block(work)

    def _message(
        self,
        name: str,
        tensor: Tensor,
        peer: int,
        source: int,
        tag: int,
        site: CallSite,
        key: Communicator,
    ) -> Message:
        shared = self._shared
        check_contiguous(name, [tensor])
        tensor = _unversioned(tensor)
        return Message(
            shared.clock, name, self._ranks, tensor, peer, source, tag, site, key, shared.mailbox
        )

    def _add(
        self, batch: Batch, channel: Stream, message: Message, uses: Uses, site: CallSite
    ) -> "GpuWork | None":
        """Add a message to a batch; once it is complete, launch it and return its one handle.

        ``batch_isend_irecv`` leaves out messages without a handle, and so returns a list of one.
        """
        batch.messages.append(message)
        batch.uses += uses
        batch.missing -= 1
        if batch.missing:
            return None
        del self._fleet.batches[self._rank]
        self._device.clock.advance(self._device.costs.communication_launch_s)
        self._shared.clock.act()
        if self._recorder:
            self._recorder.end_batch(self._info, batch.messages)
        names = [f"i{message.name} {message.toward()}" for message in batch.messages]
        self._device.compare_batch(names, batch.uses, site[0])
        text = f"a batch of {len(batch.messages)} messages"
        go = partial(self._send, batch.messages)
        tensors = [tensor for tensor, _ in batch.uses]
        work = work_of(message, tensors, Handles(), self._limit_s, GpuWork)
        work.end = self._launch(channel, batch.messages, batch.uses, text, site, go)
        return work

    def _send(self, messages: Sequence[Message], at_s: float) -> None:
        for message in messages:
            message.posted_s = at_s
            self._shared.mailbox.held.pop(message, None)
            try:
                self._shared.mailbox.post(message)
            except Mismatch as error:
                raise self._noted(error, message) from None


def _as_number(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor of one element in the shape of another one."""
    return tensor.view_as(part) if tensor.numel() == part.numel() == 1 else tensor


def _unversioned(tensor: Tensor) -> Tensor:
    """Return the same tensor with a version of its own.

    Bytes may arrive when autograd has already saved a tensor that it gets only after ``wait()``.
    """
    return tensor if tensor.is_sparse else tensor.data


class GpuWork(SimWork):
    """Handle of communication on a stream.

    Attributes:
        end: End of the communication, for which streams can wait.
    """

    __slots__ = ("end",)

    end: Mark

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the host goes on at once."""
        if device := this_device():
            device.hold(self.end)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return whether the stream is done with it; if so, all later work comes after it."""
        is_completed = super().is_completed()
        if is_completed and (device := this_device()):
            device.learn(self.end.reached)
        return is_completed

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future whose ``wait()`` makes the current stream wait.

        In a backward pass, DistributedDataParallel takes the value at the end.
        """
        future = GpuFuture(self.end)
        future.set_result(list(self.tensors))
        future.come_due()
        return future


class BarrierWork(GpuWork):
    """Handle of a barrier, for which the host waits."""

    __slots__ = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all ranks have called the barrier and the stream is done."""
        super().wait(timeout)
        if device := this_device():
            site = device.places.call_site()[0]
            device.sync("barrier()", [device.current_stream(self.end.index)], site)
        return True


def _keep(value: Any) -> None:
    """Let tensors live until all streams are done with them, as torch's futures do."""
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, Tensor) and (home := home_of(tensor)):
            home.grave = None


class GpuFuture(torch.futures.Future):  # type: ignore[type-arg]
    """Future of communication on a stream; it is complete, as the host need not wait.

    Args:
        end: End of the communication.
    """

    def __init__(self, end: Mark) -> None:
        super().__init__()
        self.end = end

    def come_due(self) -> None:
        """Make the stream wait: now, or in a backward pass at its end.

        A static graph's first all-reduces are themselves called at the end, outside of any node.
        """
        device = this_device()
        if device is None:
            return
        if torch._C._current_autograd_node() is None:
            device.hold(self.end)
        else:
            Variable._execution_engine.queue_callback(partial(device.hold, self.end))

    def wait(self) -> Any:
        """Make the current stream wait, and return the value."""
        if device := this_device():
            device.hold(self.end)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> "GpuFuture":
        """Run ``callback`` on a stream of its own, behind the communication."""
        device = this_device()
        if device is None:
            raise RuntimeError("a future of a simulated rank belongs to its threads")
        before = device.current_stream()
        side = device.side_stream(before.index)
        device.set_stream(side)
        try:
            device.hold(self.end)
            _keep(self.value())
            value = callback(self)
            _keep(value)
            later = GpuFuture(Mark.of(side, device.host_s()))
        finally:
            device.set_stream(before)
        later.set_result(value)
        later.come_due()
        return later
