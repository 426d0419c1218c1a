"""The ranks' virtual time: computing, waiting, and the record of both.

rank 0   ── computes ──┬ act: all earlier ranks go first
                       └ block · · · · · ready ── computes
noted         compute        waited
"""

from collections.abc import Callable, Iterable

from distlab.sim.engine.faults import Faults
from distlab.sim.engine.overlap import Overlap
from distlab.sim.engine.patience import MAX_POLLS, POLL_S
from distlab.sim.engine.scheduler import Scheduler, Strand
from distlab.sim.engine.trace import Trace
from distlab.sim.reporting.sites import Site

CLOCK_TICK_S = 1e-9  # resolution of time.perf_counter_ns
REFUSED_S = 1e-3  # cost of a refused call; if it were free, a loop of retries would never end


class Clock:
    """The running rank's clock, and the operations that move it forward.

    Args:
        trace: Record of computing and waiting.
        overlap: Model of the computation time lost to collectives, or None.

    Attributes:
        scheduler: Scheduler of the ranks. Code that runs for every message reads
            ``scheduler.current``, which is faster than ``current``.
        loses_time: True if computation loses time to collectives.
        block: Method that waits until ``ready`` is called for the running rank, and returns whether
            that happened in time.
        ready: Method that lets a blocked rank continue at a given time or later.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trace: Trace,
        faults: Faults,
        overlap: Overlap | None = None,
    ) -> None:
        self.trace = trace
        self._overlap = overlap
        self.loses_time = overlap is not None
        self.num_ranks = len(scheduler.ranks)
        self.scheduler = scheduler
        self.block, self.ready = scheduler.block, scheduler.ready
        self._computed_until = [0.0] * self.num_ranks
        self._jitter_s = faults.jitter_s
        has_jitter = faults.jitter_s > 0
        self._jitter = [faults.jitter(rank) for rank in range(self.num_ranks)] if has_jitter else []

    @property
    def current(self) -> Strand:
        """The running strand: one thread of a rank."""
        return self.scheduler.current

    def act(self, *, is_progress: bool = True) -> None:
        """Let all earlier ranks go first; called before every action that other ranks can notice.

        Args:
            is_progress: False for a call that a rank may repeat forever without any effect.
        """
        rank = self.scheduler.current
        if self._overlap:
            rank.clock_s += self._overlap.pay(rank.number)
        rank.patience.acts(rank.clock_s, is_progress=is_progress)
        if self._jitter:
            rank.clock_s += self._jitter[rank.number].random() * self._jitter_s
        if rank.clock_s > self._computed_until[rank.number]:
            self.note_compute(rank, rank.clock_s)
        self.scheduler.act()

    def read(self) -> float:
        """Return the running rank's time.

        Reading is free unless a rank does little else: code that waits for time to pass, such as a
        busy loop or asyncio, must see it pass. So the first hundred readings after a communication
        call are free. Later readings take time, which doubles with every further hundred. No
        two readings are equal, so their difference is never 0.
        """
        rank = self.scheduler.current
        if cost_s := rank.patience.reading_s():
            rank.clock_s += cost_s
            self.scheduler.act()
        rank.last_reading_s = max(rank.clock_s, rank.last_reading_s + CLOCK_TICK_S)
        return rank.last_reading_s

    def advance(self, seconds: float) -> None:
        """Advance the running rank's clock by the duration of a computation.

        The rank's other threads share its memory, so any that have earlier clocks go first.
        """
        strand = self.scheduler.current
        start_s = strand.clock_s
        strand.clock_s += seconds
        if self._overlap:
            self._overlap.computed(strand.number, start_s, strand.clock_s, self.scheduler.now_s)
            strand.clock_s += self._overlap.pay(strand.number)
        strand.patience.works(strand.clock_s)
        if len(strand.rank.strands) > 1:
            self.scheduler.act()

    def collective_begins(self, ranks: Iterable[int], at_s: float) -> None:
        """Note that a collective's bytes begin to travel."""
        if self._overlap:
            for rank in ranks:
                self._overlap.begins(rank, at_s)

    def collective_ends(self, ranks: Iterable[int], at_s: float) -> None:
        """Note that a collective's bytes have arrived, and charge ranks that computed meanwhile."""
        if self._overlap:
            for rank in ranks:
                self._overlap.ends(rank, at_s)

    def sleep(self, seconds: float) -> None:
        """Advance the running rank's clock and let other ranks act; it may be waiting for them."""
        self.scheduler.current.clock_s += max(seconds, POLL_S)
        self.scheduler.rest()

    def gave_up(self, operation: object) -> None:
        """Note that a wait of the running rank has timed out; the rank may wait again."""
        self.scheduler.rest(lambda: operation)

    def refused(self, operation: object) -> None:
        """Charge the running rank for an operation that can never complete.

        If it were free, a rank that keeps retrying would never let time pass.
        """
        self.scheduler.current.clock_s += REFUSED_S
        self.scheduler.rest(lambda: operation)

    def poll(self, operation: Callable[[], object], max_polls: int = MAX_POLLS) -> None:
        """Charge the running rank for polling an operation.

        Args:
            operation: Function that returns the polled operation.
            max_polls: Number of unsuccessful polls after which the rank counts as waiting.
        """
        self.scheduler.current.clock_s += POLL_S
        self.scheduler.poll(operation, max_polls)

    def settle(self, since_s: float) -> float:
        """Charge the running rank for its lost time; return when its wait really began."""
        if self._overlap:
            strand = self.scheduler.current
            since_s += self._overlap.pay(strand.number)
            strand.clock_s = max(strand.clock_s, since_s)
        return since_s

    def waited(self, name: str, site: Site, start_s: float) -> None:
        """Record that the running rank has waited since ``start_s``, and computed before that."""
        rank = self.scheduler.current
        if rank.order:
            return
        number, now_s = rank.number, rank.clock_s
        if start_s > self._computed_until[number]:
            self.note_compute(rank, start_s)
        self.trace.waited(number, name, site, start_s, now_s)
        self._computed_until[number] = now_s

    def begin_run(self) -> None:
        """Begin at the scheduler's time; what was before it is no computation of any rank."""
        self._computed_until = [self.scheduler.now_s] * self.num_ranks

    def note_compute(self, rank: Strand, until_s: float) -> None:
        """Record that a rank has computed since its last wait; only its first thread counts."""
        if rank.order:
            return
        since_s = self._computed_until[rank.number]
        if until_s > since_s:
            self.trace.computed(rank.number, since_s, until_s)
        self._computed_until[rank.number] = until_s
