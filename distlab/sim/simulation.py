"""A simulated world, assembled from its parts; ``simulate`` runs a function in one."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from distlab.process_group.call import Call
from distlab.sim.collectives import algorithms
from distlab.sim.collectives.phases import Phase
from distlab.sim.device.device import Device
from distlab.sim.engine.clock import Clock
from distlab.sim.engine.overlap import Overlap
from distlab.sim.engine.scheduler import Killed, Rank, Scheduler, Stopped, Strand
from distlab.sim.engine.trace import Trace
from distlab.sim.gpu import surface
from distlab.sim.gpu.device import HostAndGpus
from distlab.sim.gpu.flight_recorder import HANGS, FlightRecorder
from distlab.sim.gpu.group import Fleet, GpuGroup
from distlab.sim.gpu.mixtures import note_on
from distlab.sim.hardware.cluster import Cluster, choose_cluster
from distlab.sim.hardware.topology import Place
from distlab.sim.isolation import forks, host, modules, patches
from distlab.sim.isolation.exits import Exits, deaths_due
from distlab.sim.isolation.groups import Groups
from distlab.sim.isolation.profiler import SharedProfiler
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.isolation.refusals import Refusals
from distlab.sim.isolation.threads import Threads
from distlab.sim.isolation.worker_processes import WorkerProcesses
from distlab.sim.messages.disagreement import device_of
from distlab.sim.messages.group import Failures, Shared, SimGroup
from distlab.sim.messages.limits import aborted_error
from distlab.sim.messages.mailbox import Mailbox
from distlab.sim.messages.meetings import Meetings
from distlab.sim.messages.pending import Buffers, Pending
from distlab.sim.messages.work import Handles
from distlab.sim.network.traffic import Traffic
from distlab.sim.postmortem import handlers, rows
from distlab.sim.postmortem.ending import (
    doing_of_others,
    exit_error,
    first_error,
    places_of_others,
    rank_error,
    standstill_error,
)
from distlab.sim.postmortem.standstill import History, Standstill
from distlab.sim.reporting.errors import Deadlock, Mismatch, RankError, SimulationError
from distlab.sim.reporting.report import place, table
from distlab.sim.reporting.sites import Places
from distlab.sim.results.simulated import Options, Simulated
from distlab.sim.sanitizer.sanitizer import Sanitizer
from distlab.sim.sanitizer.steps import Steps
from distlab.util.text import rank_names

T = TypeVar("T")


class Simulation:
    """A simulated world; it creates its parts, and gives each one the other parts that it uses."""

    def __init__(
        self,
        num_ranks: int,
        cluster: Cluster,
        options: Options,
        running: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        options.faults.check_ranks(num_ranks)
        for pattern, factor in options.faults.slow_links.items():
            cluster = cluster.slowed(pattern, factor)
        self.num_ranks, self.cluster, self.options = num_ranks, cluster, options
        places = [cluster.place_of(rank) for rank in range(num_ranks)]
        self.rank_states = RankStates(places, options.seed, running)
        self.places = Places(options.given)
        self.handles, self.exits = Handles(), Exits(self.places)
        self.trace = Trace(num_ranks, has_events=options.has_events)
        self.scheduler = self._make_scheduler()
        overlap = Overlap(num_ranks, options.overlap_cost) if options.overlap_cost else None
        self.clock = Clock(self.scheduler, self.trace, options.faults, overlap)
        self.devices = self._make_devices(places)
        self.interrupted = ""  # where the last interrupt has met a rank
        self._told = set[str]()
        self._raised: dict[int, BaseException] = {}  # what ranks raised in this run, in that order
        self.refusals = Refusals(self.clock, self.rank_states, self.exits, self.places)
        self.worker_processes = WorkerProcesses()
        self.profiler = SharedProfiler(self.rank_states, self.places)
        self.steps, self.sanitizer = self._make_watchers()
        self.groups = self._make_groups()
        self.threads = Threads(
            self.scheduler, self.clock, self.rank_states, self.places, self._in_another_thread
        )

    def _make_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.num_ranks, self.rank_states.switch)
        scheduler.describe_interrupt = self._interrupted
        scheduler.is_in_program = self.places.is_in_program
        return scheduler

    def _make_groups(self) -> Groups:
        """Make the parts through which ranks communicate, and return the process groups."""
        options = self.options
        self.failures = Failures(self._explained, self.scheduler.end_world)
        traffic = Traffic(self.cluster, self.scheduler, self.trace, options.faults)
        buffers = Buffers(
            is_strict=options.is_strict and not self.fleet,  # GPUs compare the order of accesses
            unnoticed=self._unnoticed if self.devices else None,
        )
        self.mailbox = Mailbox(
            traffic, buffers, eager_bytes=options.eager_bytes, p2p_order=options.p2p_order
        )
        self.meetings = Meetings(
            self.clock, traffic, buffers, self._plan, self.places, self.sanitizer
        )
        shared = Shared(
            self.clock, self.places, self.mailbox, self.meetings, self.handles, self.failures
        )
        make_group = partial(GpuGroup, fleet=self.fleet) if self.fleet else SimGroup
        groups = Groups(shared, self.rank_states.tables, self.rank_states.is_in_rank, make_group)
        if self.fleet:
            self.fleet.crossings = self.mailbox.crossings
            self.fleet.communicators.made = groups.made
        return groups

    def _make_devices(self, places: Sequence[Place]) -> Sequence[Device]:
        """Return a device per rank, or none if computation and memory are not simulated."""
        options, gpu = self.options, self.cluster.gpu
        self.fleet = self._make_fleet(places) if options.semantics == "nccl" else None
        if self.fleet:
            return self.fleet.devices
        if not (gpu is not None if options.has_devices is None else options.has_devices):
            return []
        return [
            Device(
                gpu,
                advance=lambda seconds, _: self.clock.advance(seconds),
                capacity_bytes=options.capacity_bytes,
                slowdown=options.faults.slow_ranks.get(rank, 1.0),
            )
            for rank in range(self.num_ranks)
        ]

    def _make_fleet(self, places: Sequence[Place]) -> Fleet:
        """Return the hosts and GPUs of all ranks, for NCCL's semantics.

        Raises:
            SimulationError: The cluster does not say what its GPUs are.
        """
        options, gpu = self.options, self.cluster.gpu
        if gpu is None or options.has_devices is False:
            raise SimulationError(
                "NCCL's semantics need a cluster with GPUs, such as dgx-h100, and devices"
            )
        devices = [
            HostAndGpus(
                gpu,
                clock=self.clock,
                places=self.places,
                local=local,
                num_gpus=self.cluster.gpus_per_node,
                costs=options.costs,
                has_tracks=options.has_events,
                capacity_bytes=options.capacity_bytes,
                slowdown=options.faults.slow_ranks.get(rank, 1.0),
            )
            for rank, (_, local) in enumerate(places)
        ]
        watched = range(self.num_ranks if options.watchdog else 0)
        recorders = {rank: FlightRecorder(self.places) for rank in watched}
        folder = Path(options.watchdog) if options.watchdog else None
        return Fleet(devices, places, recorders=recorders, watchdog=folder)

    def _make_watchers(self) -> tuple[Steps | None, Sanitizer | None]:
        observer, is_sanitized = self.options.observer, self.options.is_sanitized
        if not is_sanitized and observer is None:
            return None, None
        watched = (
            self.rank_states,
            self.places,
            self._unnoticed if self.devices else contextlib.nullcontext,
        )
        steps = Steps(*watched)
        if observer is not None:
            steps.show(observer)
        return steps, Sanitizer(*watched, steps, self.handles.open) if is_sanitized else None

    def _unnoticed(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which operations do not count as the running rank's work."""
        return self.devices[self.rank_states.current].unnoticed()

    def _plan(self, call: Call, group: tuple[int, ...]) -> list[Phase]:
        name, root = self.options.algorithm, call.root
        if self.fleet and (sizes := call.uneven_bytes) and device_of(call) == "cuda":
            return algorithms.plan_uneven(call.name, name, group, sizes, self.cluster)
        return algorithms.plan(call.name, name, group, call.num_bytes, self.cluster, root=root)

    # The run

    def run(
        self, fn: Callable[..., T], args: tuple[object, ...], *, joined: bool, own_modules: bool
    ) -> Simulated[T]:
        """Run ``fn(*args)`` on every rank; ``simulate`` describes the arguments."""
        results: list[Any] = [None] * self.num_ranks

        def program(rank: Rank) -> None:
            if joined:
                self.join()
            results[rank.number] = self.call(rank, fn, args)
            if self.fleet:
                self.fleet.devices[rank.number].sync("")

        with contextlib.closing(self.scheduler):
            self.run_ranks(program, own_modules=own_modules)
        with self._findings_told():
            if self.failures.first:  # the ranks caught this error and continued
                raise self.failures.first
            self._note_what_is_left()
        end_s = max(rank.clock_s for rank in self.scheduler.ranks)
        self.trace.network_s = max(end_s, self.scheduler.now_s)
        flops = [device.flops for device in self.devices] or [0] * self.num_ranks
        return Simulated(
            results,
            self.trace,
            end_s,
            self.cluster,
            self.options,
            flops,
            self._findings(),
            self.fleet.gpu_time() if self.fleet else None,
        )

    def begin_run(self, ranks: Collection[int]) -> None:
        """Make ranks ready for another run, whose reports are about that run only.

        They still show what earlier runs have left unfinished.
        """
        self.scheduler.renew(ranks)
        self.exits.forget()
        self.clock.begin_run()
        self.trace.begin_run()
        self.refusals.begin_run()
        self.handles.begin_run()
        self.meetings.begin_run()
        self.mailbox.begin_run()
        self.threads.notes.begin_run()

    def run_ranks(self, program: Callable[[Rank], None], *, own_modules: bool) -> None:
        """Run a program on the ranks that are ready, each in its place and on its device."""

        def body(rank: Rank) -> None:
            self.rank_states.move_in(rank)
            watched = self.sanitizer.operations() if self.sanitizer else contextlib.nullcontext()
            with (
                torch.autograd.set_multithreading_enabled(False),
                self._on_device(rank),
                watched,
            ):
                program(rank)
                self.clock.note_compute(rank, rank.clock_s)

        separate = modules.separate(self.rank_states) if own_modules else contextlib.nullcontext()
        with self._findings_told(), self._process_prepared(), separate:
            self.rank_states.begin(self.scheduler.first())
            try:
                self.scheduler.run(body, self._standstill_error)
            finally:
                self.rank_states.rest()
                self._raised.clear()
                for device in self.devices:
                    device.on_interrupt = None

    def _interrupted(self, strand: Strand) -> BaseException:
        """Let the next operation end the running rank; return the error, which names its line.

        If a rank has failed, and waits until this one has got as far, the error is that rank's.
        """
        for device in self.devices:
            device.on_interrupt = self.scheduler.act
        frame = sys._current_frames().get(strand.ident)
        site = self.places.call_site(frame, strand.ident)[0]
        where = f" at {place(site)}" if site[0] else ""
        interrupted = self.interrupted = f"rank {strand.number} was interrupted{where}"
        for failed, error in [*self._raised.items()][:1]:
            then = f"Then {interrupted}"
            return rank_error(failed, self.num_ranks, error, self.places, then)
        others = places_of_others(strand.number, self.scheduler.ranks, self.places)
        return KeyboardInterrupt("\n\n".join(filter(None, [interrupted, others])))

    def end_threads(self) -> None:
        """End the threads that have lived on after the runs."""
        scheduler = self.scheduler
        living = [rank.number for rank in scheduler.ranks if not rank.is_killed]
        if living and not all(strand.has_ended for strand in scheduler.strands()):
            scheduler.keeps_threads = False
            scheduler.renew(living[:1])
            with contextlib.suppress(Stopped):
                self.run_ranks(lambda _: scheduler.end_world(Stopped()), own_modules=True)

    def abort(self) -> None:
        """Abort, after an error, what ranks had begun and no rank will finish.

        Transfers under way arrive. All ranks then agree on the number of each group's next call,
        and on that of the next group.
        """
        error, now_s = aborted_error(), self.scheduler.latest_s()
        for rank, operation, since_s in self.scheduler.cut_short:
            self.trace.waited(rank, operation.name, operation.site, since_s, now_s)
        aborted = self.unmatched()
        if self.fleet:
            aborted += self.fleet.launched
            self.fleet.abort(now_s)
        self.meetings.abort(error)
        self.mailbox.abort(error, now_s)
        self.scheduler.drain()
        for pending in aborted:
            pending.let_go()
        self.handles.open.clear()
        self.failures.forget()
        num_calls = Counter[object]()
        groups = [*self.rank_states.groups()]
        for key, number in (group.place for group in groups):
            num_calls[key] = max(num_calls[key], number)
        for group in groups:
            group.skip_to(num_calls[group.place[0]])
        self.rank_states.count_groups_alike()
        self.groups.count_joins_alike()

    def join(self) -> None:
        """Make the running rank's default group, of NCCL if it has GPUs."""
        asked: dict[str, Any] = {"backend": "nccl"} if self.fleet else {}
        self.groups.join(**asked)

    def _findings(self) -> list[str]:
        return self.sanitizer.findings.lines() if self.sanitizer else []

    def news(self) -> list[str]:
        """Return the lines on wrong uses of GPUs that have not been returned before."""
        return self._news(self.fleet.wrong(has_ended=False) if self.fleet else [])

    def new_findings(self) -> list[str]:
        """Return the lines of the sanitizer that have not been returned before."""
        return self._news(self._findings())

    def _news(self, lines: Sequence[str]) -> list[str]:
        news = [line for line in lines if line not in self._told]
        self._told.update(news)
        return news

    @contextlib.contextmanager
    def _findings_told(self) -> Iterator[None]:
        """Add to an error what was found until then: it may be the cause."""
        try:
            yield
        except SimulationError as error:
            error.note((), _until_then("wrong on GPUs", self.news()))
            error.note((), _until_then("found by --sanitize", self.new_findings()))
            raise

    @contextlib.contextmanager
    def _process_prepared(self) -> Iterator[None]:
        dying = deaths_due(
            self.options.faults, self.scheduler, self.clock, self.rank_states, self.exits
        )
        noting = self.worker_processes.noted()
        with contextlib.ExitStack() as watching:
            for prepared in (patches.installed(self), host.prepared(), noting, dying):
                watching.enter_context(prepared)
            if not self.scheduler.keeps_threads:
                watching.callback(self.worker_processes.close)
            if self.fleet and self.cluster.gpu:
                surface.install(watching, self.rank_states.is_in_rank, self.cluster.gpu.name)
            if self.steps:
                watching.enter_context(self.steps.watching())
            if self.sanitizer:
                watching.enter_context(self.sanitizer.watching())
            yield

    def call(self, rank: Rank, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Call the program of a rank; an error names the rank, and shows where the others are."""
        try:
            with forks.ended(), self.exits.watched(rank.number):
                return fn(*args)
        except SimulationError as error:
            raise self.failures.first or self._explained(error) from None
        except Stopped:
            raise
        except Killed as killed:
            due_s = {**self.options.faults.kill_ranks, **self.trace.killed_in_step_s}
            self.exits.died(rank.number, killed, due_s[rank.number])
            raise
        except BaseException as error:  # torch's CheckpointException is only a BaseException
            self.clock.note_compute(rank, rank.clock_s)
            self._let_others_go_on(rank.number, error)
            raise self.failures.first or self._rank_error(rank.number, error) from error

    def _let_others_go_on(self, failed: int, error: BaseException) -> None:
        """Let the other ranks get as far as they do in the time until a rank has failed.

        If the rank has exited, end at once: on all ranks, a script would say why, and exit.
        """
        if not (isinstance(error, SystemExit) or self.scheduler.is_ending()):
            self._raised[failed] = error
            self.scheduler.go_last()

    def _rank_error(self, number: int, error: BaseException) -> RankError:
        if self.fleet is None:
            patches.explain_missing_gpu(error, number)
        # A failed assertion may concern a tensor that the program read too early.
        is_check = isinstance(error, AssertionError)
        below = (
            note_on(error),
            self.refusals.outside_note(number),
            self.handles.note_of_failed(number) if is_check else "",
            self._others([number]),
        )
        text = "\n\n".join(filter(None, below))
        return rank_error(number, self.num_ranks, error, self.places, text)

    def _others(self, failed: Collection[int]) -> str:
        ranks, history = self.scheduler.ranks, self._history()
        return doing_of_others(failed, ranks, self.places, history, self._raised)

    def dead(self, ranks: Collection[int]) -> list[int]:
        """Return which of some ranks have been killed by a fault."""
        return [rank for rank in sorted(ranks) if self.scheduler.ranks[rank].is_killed]

    def death_error(self, ranks: Collection[int]) -> SimulationError | None:
        """Return an error that names the dead among some ranks, or None if all of them live."""
        dead = self.dead(ranks)
        if not dead:
            return None
        ends = rows.ends(Standstill({}, dead, dead, self._history()))
        are = f"{rank_names(dead)} {'is' if len(dead) == 1 else 'are'}"
        message = f"{are} dead: run on the other ranks, or begin a new session"
        return SimulationError("\n".join([message, *table(ends)]), dead)

    def end_process(self, cause: str) -> None:
        """End the world without any clean-up, because a rank's process would end at once.

        Args:
            cause: What ends it, such as ``os._exit(1)`` or ``SIGTERM``.

        In separate processes, the other ranks would continue, and fail once they needed this one.
        """
        rank = self.rank_states.current
        # The others do not go on first: the rank may exit while it imports a module, and they would
        # wait for the lock of that import.
        site = self.places.call_site()[0]
        error = exit_error(rank, self.num_ranks, cause, site, self._others([rank]))
        self.scheduler.end_world(self.failures.first or error)

    @contextlib.contextmanager
    def _on_device(self, rank: Rank) -> Iterator[None]:
        """Run the thread's operations on the rank's device; record peak memory at the end."""
        if not self.devices:
            yield
            return
        device = self.devices[rank.number]
        try:
            with device:
                yield
        finally:
            self.trace.peak_bytes[rank.number] = device.memory.peak_bytes
            self.trace.peak_by_category[rank.number] = {**device.memory.peak_by_category}

    @contextlib.contextmanager
    def _in_another_thread(self) -> Iterator[None]:
        """Enter the same contexts as the rank's first thread: its device and autograd mode."""
        device = self.devices[self.rank_states.current] if self.devices else None
        self.groups.show()
        inside = device.in_another_thread() if device else contextlib.nullcontext()
        with torch.autograd.set_multithreading_enabled(False), inside:
            yield

    # The end

    def _note_what_is_left(self) -> None:
        """Record the operations that never matched and the handles that were never waited for.

        Raises:
            Mismatch: an operation never matched, in strict mode.
        """
        alone = self.unmatched()
        if alone and self.options.is_strict:
            raise rows.never_met_error(alone)
        self.trace.leftovers = rows.never_met(alone)
        alive = (rank.number for rank in self.scheduler.ranks if not rank.is_killed)
        self.trace.unwaited = rows.unwaited(self.handles, alive)
        self.trace.waited_twice = table([*self.handles.twice])
        if self.sanitizer:
            self.sanitizer.note_unwaited(self.trace.unwaited)
            crossings = self.mailbox.crossings  # on GPUs, those that change places are told anyway
            self.sanitizer.note_crossed(crossings.others() if self.fleet else crossings.lines())

    def unmatched(self) -> list[Pending]:
        """Return the operations that other ranks have yet to join."""
        messages = (*self.mailbox.unmatched(), *self.mailbox.waiting())
        return [*messages, *self.meetings.leftovers()]

    def _standstill_error(self) -> SimulationError:
        if self.failures.first:
            return self.failures.first
        ranks = self.scheduler.ranks
        return self._noted(standstill_error(ranks, self.places, self.mailbox, self._history()))

    def _explained(self, error: SimulationError) -> SimulationError:
        return self._noted(first_error(error, self.scheduler.ranks, self.places))

    def _history(self) -> History:
        return History(
            {
                rank.number: (rank.num_calls, rank.last_call)
                for rank in self.scheduler.ranks
                if isinstance(rank.last_call, Pending)
            },
            self.trace.arrived(),
            self.groups.made,
            self.exits.known,
            self.meetings.splits,
            is_in_order=self.mailbox.lanes is not None or self.fleet is not None,
            deaths=self.exits.deaths,
            is_session=self.scheduler.keeps_threads,
            absent=[rank.number for rank in self.scheduler.ranks if not rank.takes_part],
        )

    def _after_hang(self, error: SimulationError) -> list[str]:
        """Return lines on ranks that wait for each other on NCCL, where nothing ends that."""
        is_hang = isinstance(error, Deadlock) and error.kind not in ("key never set", "thread wait")
        if not self.fleet or not is_hang:
            return []
        messages = (*self.mailbox.unmatched(), *self.mailbox.waiting())
        return self.fleet.after_hang(HANGS, [*messages, *self.meetings.leftovers()])

    def _noted(self, error: SimulationError) -> SimulationError:
        """Add notes to ``error``, beginning with caught errors, which may have caused it."""
        if isinstance(error, Deadlock | Mismatch):
            ranks, places = self.scheduler.ranks, self.places
            ended = [r for r in error.ranks if ranks[r].has_left and not ranks[r].is_killed]
            causes = (
                *handlers.handled(ranks, places),
                *self.refusals.notes({rank: ranks[rank].num_calls for rank in error.ranks}),
                *self.threads.notes.failures(),
            )
            questions = (
                () if causes else handlers.suspicions(error, ranks, places, self.exits.known)
            )
            daemons = self.threads.notes.of_daemons(ended)
            hang = self._after_hang(error)
            error.note(causes, (*questions, *self.handles.notes(ended), *daemons, *hang))
        return error


def _until_then(heading: str, found: Sequence[str]) -> list[str]:
    """Return lines to put below an error."""
    return [f"{heading} until then:", *(f"  {line}" for line in found)] if found else []


def simulate(
    fn: Callable[..., T],
    num_ranks: int,
    *args: object,
    cluster: Cluster | str | None = None,
    options: Options | None = None,
    joined: bool = True,
    own_modules: bool = False,
    running: MutableSequence[int] | memoryview | None = None,
) -> Simulated[T]:
    """Run ``fn(*args)`` on ``num_ranks`` simulated ranks, in this process.

    Args:
        fn: Function to run on every rank, inside an initialised ``torch.distributed`` world.
        num_ranks: Number of ranks, 1 to 1024.
        cluster: Cluster, or the name of a preset, which gets as many nodes as the ranks need. None
            stands for one node with a switch and a GPU per rank.
        joined: False to start without a process group, as under torchrun.
        own_modules: True to give each rank its own copies of the program's modules that it imports.
        running: Memory shared with a supervisor process, or None. It holds the number of the
            running rank, followed by the thread identifier of every rank.

    Returns:
        Results by rank, the trace and the virtual time.

    Raises:
        SimulationError: the world failed; its subclasses are in ``reporting.errors``.
    """
    options = options or Options()
    chosen = choose_cluster(cluster, num_ranks)
    simulation = Simulation(num_ranks, chosen, options, running)
    return simulation.run(fn, args, joined=joined, own_modules=own_modules)
