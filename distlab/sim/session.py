"""A simulated world that lives on between runs, as the cells of a notebook need it.

    session = Session(2)
    session.run(send)          rank 0 calls isend: a message is under way …
    session.run(receive)       … and rank 1 receives it in the next run

Between two runs, the clocks, groups, generators, memory and unfinished operations of the ranks stay
as they are. So do threads that ranks have started: they stand still between runs, and go on in the
next one, whichever ranks it is on. A run does not await them.

An error ends the run, not the world: operations that some rank had yet to join are aborted, threads
that communicate just then end, and all ranks can begin the next run. A rank that a fault has killed
stays dead.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

from distlab.sim.engine.scheduler import Rank, Scheduler
from distlab.sim.engine.trace import Event
from distlab.sim.hardware.cluster import Cluster, choose_cluster
from distlab.sim.postmortem import rows
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.results.gpu_time import OnTrack
from distlab.sim.results.simulated import Options
from distlab.sim.simulation import Simulation

T = TypeVar("T")


@dataclass(frozen=True)
class Lap(Generic[T]):
    """Outcome of one run of a session.

    Attributes:
        results: Result of each rank whose function has returned, by rank.
        error: Error that ended the run, or None; a ``KeyboardInterrupt`` if the user ended it.
        wrong: Lines on wrong uses of GPUs and on what the sanitizer found, new since the last run.
        start_s: Virtual time at which the run began.
        seconds: Virtual time that it took.
        num_bytes: Bytes that the ranks have sent in it.
        num_messages: Messages that the ranks have sent in it.
        exposed_s: Virtual time that each rank has waited in it.
        events: Operations, computation and waits of the ranks.
        cut_short: Operations for which ranks still waited when an error ended the run, such as
            ``recv from rank 2``, by rank.
        tracks: Work of GPUs with NCCL's semantics, including work that goes on after the run.
    """

    results: dict[int, T]
    error: SimulationError | KeyboardInterrupt | None
    wrong: Sequence[str]
    start_s: float
    seconds: float
    num_bytes: float
    num_messages: int
    exposed_s: Sequence[float]
    events: Sequence[Event]
    cut_short: Mapping[int, str]
    tracks: Sequence[OnTrack]


class Session:
    """A simulated world whose ranks run one function after another.

    Each rank runs all its functions in one thread, and has its own copies of the program's modules.

    Args:
        num_ranks: Number of ranks, 1 to 1024.
        cluster: Cluster, or the name of a preset, as for ``simulate``.
        options: Settings of the world.
    """

    def __init__(
        self, num_ranks: int, cluster: Cluster | str | None = None, options: Options | None = None
    ) -> None:
        chosen = choose_cluster(cluster, num_ranks)
        world = Simulation(num_ranks, chosen, options or Options())
        world.scheduler.keeps_threads = True
        self._open: Simulation | None = world  # None once closed
        self._threads: dict[int, int] = {}  # the thread of each rank that knows its groups by name
        self._running = threading.Lock()
        world.run_ranks(self._join, own_modules=False)

    @property
    def _world(self) -> Simulation:
        if self._open is None:
            raise RuntimeError("the session is closed: begin a new one")
        return self._open

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._world.num_ranks

    @property
    def options(self) -> Options:
        """Settings of the world."""
        return self._world.options

    @property
    def cluster(self) -> Cluster:
        """Cluster to which the ranks belong."""
        return self._world.cluster

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self._world.scheduler.latest_s()

    def unfinished(self) -> list[str]:
        """Return a table of the operations that other ranks have yet to join."""
        return rows.never_met(self._world.unmatched())

    def live_bytes(self) -> list[int]:
        """Return the memory that each rank uses; empty if memory is not simulated."""
        return [device.memory.live_bytes for device in self._world.devices]

    def living(self) -> list[int]:
        """Return the ranks that no fault has killed."""
        return [rank.number for rank in self._world.scheduler.ranks if not rank.is_killed]

    def modules(self) -> list[Mapping[str, ModuleType]]:
        """Return the modules of the program that each rank has imported, by name."""
        return self._world.rank_states.modules()

    def make_mains(self) -> list[ModuleType]:
        """Give each rank an empty ``__main__`` of its own, in which pickle finds its classes."""
        return self._world.rank_states.make_mains()

    def run(self, fn: Callable[[int], T], ranks: Collection[int] | None = None) -> Lap[T]:
        """Run ``fn(rank)`` on some ranks, or on all, in one process group of all ranks.

        The other ranks do nothing meanwhile, so a rank that waits for one of them deadlocks.

        Args:
            fn: Function of the rank's number.
            ranks: Ranks that run it; None for all.

        Returns:
            The results, the error if there was one, and what was sent. Ctrl-C ends the run.

        Raises:
            ValueError: There is no such rank, or there are none at all.
            RuntimeError: The session is closed, runs already, or has a rank that could not be
                interrupted.
        """
        world = self._world
        everyone = range(world.num_ranks)
        chosen = {*everyone} if ranks is None else {*ranks}
        if not chosen or chosen - {*everyone}:
            raise ValueError(f"ranks are 0 to {world.num_ranks - 1}, and at least one: {ranks}")
        with self._alone(world), _interruptible(world.scheduler):
            world.begin_run(chosen)
            return self._run(fn, chosen)

    def interrupt(self) -> None:
        """End the present run, as Ctrl-C does in the main thread; may be called in any thread."""
        self._world.scheduler.interrupt()

    @contextlib.contextmanager
    def _alone(self, world: Simulation) -> Iterator[None]:
        """Check that the session can run something now."""
        if world.scheduler.is_lost:
            raise RuntimeError(
                f"the ranks cannot go on: {world.interrupted}, and does not end. "
                "Begin new ones: a new Session or, in a notebook, %cluster"
            )
        if not self._running.acquire(blocking=False):
            raise RuntimeError("the ranks run a function already: wait until that has ended")
        try:
            yield
        finally:
            self._running.release()

    def _run(self, fn: Callable[[int], T], chosen: Collection[int]) -> Lap[T]:
        world, results = self._world, dict[int, T]()
        before = _Counts.of(world)

        def program(rank: Rank) -> None:
            if self._threads[rank.number] != rank.ident:
                world.groups.show()
                self._threads[rank.number] = rank.ident
            results[rank.number] = world.call(rank, fn, (rank.number,))

        error: SimulationError | KeyboardInterrupt | None = None
        try:
            if world.dead(chosen) != sorted(chosen):
                world.run_ranks(program, own_modules=True)
            error = world.failures.first  # one that the ranks caught, before they continued
        except (SimulationError, KeyboardInterrupt) as raised:
            error = raised
        if error and not world.scheduler.is_lost:
            world.abort()
        return before.lap(world, results, error or world.death_error(chosen))

    def close(self) -> None:
        """End the world and its threads, and forget it."""
        world, self._open = self._open, None
        if not world:
            return
        world.worker_processes.close()
        if not world.scheduler.is_lost:
            world.end_threads()
            world.exits.forget()
            world.scheduler.close()

    def _join(self, rank: Rank) -> None:
        self._world.join()
        self._threads[rank.number] = rank.ident


@contextlib.contextmanager
def _interruptible(scheduler: Scheduler) -> Iterator[None]:
    """Let SIGINT interrupt the ranks, but not the simulator where it begins or ends a run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: scheduler.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class _Counts:
    """What a world had counted before a run."""

    now_s: float
    num_bytes: float
    num_messages: int
    exposed_s: Sequence[float]

    @classmethod
    def of(cls, world: Simulation) -> "_Counts":
        trace, now_s = world.trace, world.scheduler.now_s
        sent = sum(trace.bytes_sent), sum(trace.messages)
        return cls(now_s, *sent, [*trace.exposed_s])

    def lap(
        self,
        world: Simulation,
        results: dict[int, T],
        error: SimulationError | KeyboardInterrupt | None,
    ) -> Lap[T]:
        """Return the outcome of a run that began at these counts."""
        now = _Counts.of(world)
        return Lap(
            results,
            error,
            [*world.news(), *world.new_findings()],
            self.now_s,
            world.scheduler.latest_s() - self.now_s,
            now.num_bytes - self.num_bytes,
            now.num_messages - self.num_messages,
            [now_s - s for now_s, s in zip(now.exposed_s, self.exposed_s, strict=True)],
            world.trace.take_events(),
            {wait.rank: wait.operation.brief() for wait in world.scheduler.cut_short},
            world.fleet.take_tracks(world.scheduler.latest_s()) if world.fleet else [],
        )
