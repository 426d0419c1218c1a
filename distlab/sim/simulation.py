"""One simulated world: cluster, ranks, messages, clock. ``simulate`` runs a function in it."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, MutableSequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distlab.sim import buffers, host, patches
from distlab.sim.cluster import Cluster
from distlab.sim.deadlock import History
from distlab.sim.device import Device
from distlab.sim.ending import first_error, rank_error, standstill_error
from distlab.sim.errors import Deadlock, Mismatch, SimulationError
from distlab.sim.group import SimGroup
from distlab.sim.handles import Handles
from distlab.sim.mailbox import Mailbox
from distlab.sim.meetings import Meeting
from distlab.sim.options import Options, Simulated, choose_cluster
from distlab.sim.pending import Pending
from distlab.sim.places import Places
from distlab.sim.refusals import Refusals
from distlab.sim.report import mismatch, shorten, table
from distlab.sim.roster import Roster
from distlab.sim.scheduler import Rank, Scheduler
from distlab.sim.state import RankState, RankWorld
from distlab.sim.store import SimStore
from distlab.sim.trace import Trace
from distlab.sim.traffic import Traffic
from distlab.sim.work import POLL_S

T = TypeVar("T")
_NOTHING = contextlib.nullcontext()
MAX_LEFTOVERS = 12
CLOCK_TICK_S = 1e-9  # that of time.perf_counter_ns
# Between two communication calls. A program that times its steps reads the clock a few times; one
# that reads it more often than this waits for it, and torch reads it not at all in a step.
FREE_CLOCK_READS = 100


class Simulation:
    """A world while it runs. The simulator's parts meet here; programs use ``simulate``."""

    def __init__(
        self,
        num_ranks: int,
        cluster: Cluster,
        options: Options,
        running: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self._running = [0] * (1 + num_ranks) if running is None else running
        self.num_ranks, self.cluster, self.options = num_ranks, cluster, options
        self.faults = options.faults
        self.algorithm = options.algorithm
        self.eager_bytes, self.is_strict = options.eager_bytes, options.is_strict
        self._tables = RankWorld()
        self._states = [
            RankState(rank, cluster.gpus_per_node, options.seed) for rank in range(num_ranks)
        ]
        self.places = Places(options.given)
        self.scheduler = Scheduler(num_ranks, self._switch)
        self.traffic = Traffic(cluster, self.scheduler)
        self.trace = Trace(num_ranks, self.traffic.network.bytes_by_link)
        self.mailbox = Mailbox(self)
        self.handles = Handles()
        self.refusals = Refusals()
        self.store = SimStore(self)
        self._meetings: dict[tuple[object, int], Meeting] = {}
        self._roster = Roster()
        self._joins = [0] * num_ranks  # how often each rank has made its default group
        self._everyone = tuple(range(num_ranks))
        self._global_ranks = {rank: rank for rank in self._everyone}
        self._computed_until = [0.0] * num_ranks
        has_jitter = options.faults.jitter_s > 0
        self._jitter = [options.faults.jitter(r) for r in self._everyone] if has_jitter else []
        self._devices = self._make_devices(options)

    def run(self, fn: Callable[..., T], args: tuple[object, ...], *, joined: bool) -> Simulated[T]:
        """Run ``fn(*args)`` on every rank; ``joined``: inside an initialised world."""
        results: list[Any] = [None] * self.num_ranks

        def body(rank: Rank) -> None:
            self._running[1 + rank.number] = threading.get_ident()
            with torch.autograd.set_multithreading_enabled(False), self._on_device(rank):
                if joined:
                    self.join()
                results[rank.number] = self._call(rank, fn, args)
                self._note_compute(rank, rank.clock_s)

        for rank, at_s in self.faults.kill_ranks.items():
            self.scheduler.at(at_s, partial(self.scheduler.kill, self.scheduler.ranks[rank]))
        with patches.installed(self, self._tables), host.prepared(), self._deadly_steps():
            self._states[0].bring_out(self._tables)
            self.scheduler.run(body, self._standstill_error)
        self._note_leftovers()
        self._note_unwaited()
        end_s = max(rank.clock_s for rank in self.scheduler.ranks)
        self.trace.network_s = max(end_s, self.scheduler.now_s)
        flops = [device.flops for device in self._devices] or [0] * self.num_ranks
        return Simulated(results, self.trace, end_s, self.cluster, self.options, flops)

    @contextlib.contextmanager
    def _deadly_steps(self) -> Iterator[None]:
        """Let ranks die as they begin the optimizer step that the faults name."""
        begun = [0] * self.num_ranks

        def begin_step(*_: object) -> None:
            if not self.is_in_rank():
                return
            rank = self.scheduler.current
            begun[rank.number] += 1
            if begun[rank.number] == self.faults.kill_at_steps.get(rank.number):
                self.trace.killed_in_step_s[rank.number] = rank.clock_s
                self.scheduler.kill(rank)
                self.scheduler.act()

        hook = register_optimizer_step_pre_hook(begin_step)
        try:
            yield
        finally:
            hook.remove()

    def _note_leftovers(self) -> None:
        """List what was posted and never matched; no rank waited for it, or the world would hang.

        Raises:
            Mismatch: in strict mode, if there is any.
        """
        messages = (*self.mailbox.unmatched(), *self.mailbox.waiting())
        rows = [message.row() for message in messages]
        for meeting in self._meetings.values():
            rows += [attendance.row() for attendance in meeting.attendances.values()]
        if rows and self.is_strict:
            count = "an operation was" if len(rows) == 1 else f"{len(rows)} operations were"
            raise mismatch(
                "never met",
                f"{count} posted, but never matched",
                shorten(rows, MAX_LEFTOVERS),
                "Every send needs a recv, every collective all ranks, and every request a wait().",
            )
        self.trace.leftovers = table(shorten(rows, MAX_LEFTOVERS))

    def _note_unwaited(self) -> None:
        """List the handles that were never waited for, except those of killed ranks."""
        rows = self.handles.rows(r.number for r in self.scheduler.ranks if not r.is_killed)
        self.trace.unwaited = table(shorten(rows, MAX_LEFTOVERS))

    def _call(self, rank: Rank, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        try:
            return fn(*args)
        except SimulationError as error:
            raise self._noted(
                first_error(error, self.scheduler.ranks, self._threads(), self.places)
            ) from None
        except (Exception, SystemExit) as error:
            raise rank_error(rank.number, self.num_ranks, error, self.places) from error

    def _make_devices(self, options: Options) -> list[Device]:
        """Give every rank a device, if computation and memory are to be accounted for."""
        wanted = options.has_devices
        if not (self.cluster.gpu is not None if wanted is None else wanted):
            return []
        return [
            Device(
                self.cluster.gpu,
                advance=self.compute,
                capacity_bytes=options.capacity_bytes,
                slowdown=options.faults.slow_ranks.get(rank, 1.0),
            )
            for rank in self._everyone
        ]

    @contextlib.contextmanager
    def _on_device(self, rank: Rank) -> Iterator[None]:
        """Let the thread's operations run on the rank's device; note what it held."""
        if not self._devices:
            yield
            return
        device = self._devices[rank.number]
        try:
            with device:
                yield
        finally:
            self.trace.peak_bytes[rank.number] = device.memory.peak_bytes
            self.trace.peak_by_category[rank.number] = {**device.memory.peak_by_category}

    # Who is who

    def join(self) -> None:
        """Make the default process group of the running rank."""
        number = self.scheduler.current.number
        self._joins[number] += 1
        group = SimGroup(self, self._everyone, number, (self._joins[number], "0"), "0")
        c10d._register_pg_in_world(
            group,
            backend_name=patches.BACKEND,
            store=self.store,
            group_name=GroupName("0"),
            backend_config=",".join(f"{device}:sim" for device in ("cpu", "cuda", "meta")),
            add_to_default_tag=True,
        )
        tables = self._tables.__dict__
        tables["pg_group_ranks"][group] = self._global_ranks
        tables.update(default_pg=group, group_count=1)

    def group(self, ranks: tuple[int, ...], key: object) -> SimGroup:
        """Make the running rank's view of a new group.

        Raises:
            Mismatch: another rank has made a group of other ranks under this key.
        """
        members, number = ranks or self._everyone, self.scheduler.current.number
        place = (self._joins[number], key)  # groups of a world that was left are others
        site, _ = self.places.call_site(sys._getframe(1))
        self._roster.enter(place, number, members, site)
        return SimGroup(self, members, members.index(number), place, str(key))

    def meeting(self, key: object, ranks: tuple[int, ...], number: int) -> Meeting:
        """Return the meeting of a group's ``number``-th collective call."""
        place = (key, number)
        meeting = self._meetings.get(place)
        if meeting is None:
            meeting = self._meetings[place] = Meeting(self, ranks, number)
        elif len(meeting.attendances) == len(ranks) - 1:
            del self._meetings[place]  # the last one arrives now
        return meeting

    def state(self) -> RankState:
        """Return the state of the running rank."""
        return self._states[self.scheduler.current.number]

    def is_in_rank(self) -> bool:
        """Whether the calling thread is the rank that runs."""
        return self._running[1 + self.scheduler.current.number] == threading.get_ident()

    # Time

    def act(self, name: str) -> None:
        """Let all earlier ranks go first; called before anything that others can notice."""
        rank = self.scheduler.current
        rank.num_clock_reads = 0
        if self._jitter:
            rank.clock_s += self._jitter[rank.number].random() * self.faults.jitter_s
        if rank.clock_s > self._computed_until[rank.number]:
            self._note_compute(rank, rank.clock_s)
        self.scheduler.act()

    def read_clock(self) -> float:
        """Return the running rank's time.

        Reading it is free, unless a rank does nothing else: code that waits for time to pass, such
        as a busy loop or asyncio, must see it pass. In every hundred reads, each costs twice as
        much as in the hundred before. No two readings are equal, so their difference is never 0.
        """
        rank = self.scheduler.current
        rank.num_clock_reads += 1
        if rank.num_clock_reads > FREE_CLOCK_READS:
            doublings = min(rank.num_clock_reads // FREE_CLOCK_READS - 1, 10)
            rank.clock_s += POLL_S * 2**doublings
            self.scheduler.act()
        rank.last_reading_s = max(rank.clock_s, rank.last_reading_s + CLOCK_TICK_S)
        return rank.last_reading_s

    def compute(self, seconds: float, name: str) -> None:
        """Let the running rank's clock advance."""
        self.scheduler.current.clock_s += seconds

    def waited(self, pending: Pending, start_s: float) -> None:
        """Record that the running rank has waited since ``start_s``; until then it computed."""
        rank = self.scheduler.current
        self._note_compute(rank, start_s)
        self.trace.waited(pending, start_s, rank.clock_s)
        self._computed_until[rank.number] = rank.clock_s

    def _note_compute(self, rank: Rank, until_s: float) -> None:
        since_s = self._computed_until[rank.number]
        if until_s > since_s:
            self.trace.computed(rank.number, since_s, until_s)
        self._computed_until[rank.number] = until_s

    def _switch(self, rank: Rank, next_rank: Rank) -> None:
        self._states[rank.number].put_away()
        self._states[next_rank.number].bring_out(self._tables)
        self._running[0] = next_rank.number

    # Tensors

    def unnoticed(self) -> contextlib.AbstractContextManager[object]:
        """Move data without the device counting it as the running rank's work."""
        if not self._devices:
            return _NOTHING
        return self._devices[self.scheduler.current.number].unnoticed()

    def copied(self, tensor: Tensor) -> Tensor:
        """Copy a tensor as it is now."""
        with self.unnoticed():
            return tensor.detach().clone()

    def copy(self, output: Tensor, value: Tensor) -> None:
        """Write ``value`` to ``output``."""
        if self._devices:
            with self.unnoticed():
                buffers.copy(output, value)
        else:
            buffers.copy(output, value)

    def check_unchanged(self, pending: Pending, tensor: Tensor, before: Tensor) -> None:
        """Raise, in strict mode, if a buffer was written while its operation was under way."""
        if tensor.is_meta or buffers.same_bytes(tensor.detach(), before):
            return
        raise mismatch(
            "buffer changed",
            f"rank {pending.rank} changed the tensor of its {pending.name} before wait() had "
            "returned",
            [pending.row()],
            "Until then the network may still read it.",
        )

    # The end

    def _standstill_error(self) -> SimulationError:
        ranks = self.scheduler.ranks
        threads, history = self._threads(), self._history()
        return self._noted(standstill_error(ranks, threads, self.places, self.mailbox, history))

    def _history(self) -> History:
        return History(
            {
                rank.number: (rank.num_calls, rank.last_call)
                for rank in self.scheduler.ranks
                if isinstance(rank.last_call, Pending)
            },
            self.trace.arrived(),
            self._roster.groups(),
            is_in_order=self.mailbox.lanes is not None,
        )

    def _noted(self, error: SimulationError) -> SimulationError:
        """Add which errors and open handles the ranks to blame had, if they have returned."""
        if isinstance(error, Deadlock | Mismatch):
            ranks = self.scheduler.ranks
            gone = [r for r in error.ranks if ranks[r].has_ended and not ranks[r].is_killed]
            notes = (*self.refusals.notes(gone), *self.handles.notes(gone))
            error.args = ("\n".join([str(error), *notes]),)
        return error

    def _threads(self) -> dict[int, int]:
        return dict(enumerate(self._running[1:]))


def simulate(
    fn: Callable[..., T],
    num_ranks: int,
    *args: object,
    cluster: Cluster | str | None = None,
    options: Options | None = None,
    joined: bool = True,
    running: MutableSequence[int] | memoryview | None = None,
) -> Simulated[T]:
    """Run ``fn(*args)`` on ``num_ranks`` simulated ranks, in this process.

    Args:
        fn: called in every rank, inside an initialised ``torch.distributed`` world.
        num_ranks: 1 to 1024.
        cluster: a cluster, the name of a preset (as many nodes as the ranks need), or None: one
            node with a switch and a GPU per rank.
        options: how to simulate.
        joined: False: the ranks are in no process group yet, as under torchrun.
        running: where to note the rank that runs, followed by the thread of every rank, for a
            supervisor in another process.

    Returns:
        Results by rank, the trace, the virtual time.

    Raises:
        SimulationError: one of ``errors``.
    """
    options = options or Options()
    chosen = choose_cluster(cluster, num_ranks)
    options.faults.check_ranks(num_ranks)
    for pattern, factor in options.faults.slow_links.items():
        chosen = chosen.slowed(pattern, factor)
    return Simulation(num_ranks, chosen, options, running).run(fn, args, joined=joined)
