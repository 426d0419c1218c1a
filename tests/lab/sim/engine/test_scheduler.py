"""The scheduler on its own: errors end the run, and results match a model without threads."""

import heapq
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.sim.engine.scheduler import NEVER, Killed, Rank, Scheduler

TIMEOUT_S = 120.0
Body = Callable[[Scheduler, Rank], object]


class Stuck(Exception):
    """Raised when a test's world deadlocks."""


def new_scheduler(num_ranks: int) -> Scheduler:
    return Scheduler(num_ranks, lambda _, __: None)


def run(
    scheduler: Scheduler, body: Body, on_deadlock: Callable[[], BaseException] = Stuck
) -> BaseException | None:
    """Run a world and return its exception, if any; fail if it hangs or leaves a thread behind."""
    before, raised = threading.active_count(), [None]

    def main() -> None:
        try:
            scheduler.run(partial(body, scheduler), on_deadlock)
        except BaseException as error:
            raised[0] = error
        scheduler.close()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the scheduler hangs"
    assert threading.active_count() == before
    return raised[0]


# --- how a world ends ----------------------------------------------------------------------------


def fail() -> BaseException:
    raise ValueError("in an event")


def test_an_error_in_an_event_is_not_blamed_on_the_rank_that_waits() -> None:
    caught = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            scheduler.block("forever")
        except Exception:
            caught.append(rank.number)

    scheduler = new_scheduler(2)
    scheduler.at(1.0, fail)
    assert str(run(scheduler, body)) == "in an event"
    assert caught == []


def test_an_error_in_the_report_of_a_deadlock_ends_the_world_too() -> None:
    error = run(new_scheduler(2), lambda scheduler, _: scheduler.block("forever"), fail)
    assert str(error) == "in an event"


def test_a_killed_rank_does_nothing_more_in_its_clean_up() -> None:
    acted = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        for attempt in (lambda: scheduler.block("forever"), scheduler.act, scheduler.act):
            try:
                attempt()
                acted.append(rank.number)
            except Killed:
                rank.clock_s += 1.0

    scheduler = new_scheduler(1)
    scheduler.at(1.0, lambda: scheduler.kill(scheduler.ranks[0]))
    assert run(scheduler, body) is None
    assert acted == []
    assert scheduler.now_s == 1.0


# --- against a model without threads -------------------------------------------------------------

Step = tuple[str, int, int]  # action, rank, duration
LONGEST = 3


@st.composite
def programs(draw: st.DrawFn) -> list[list[Step]]:
    """Draw each rank's steps: compute, act, give a token after a delay, await one, set a timer."""
    num_ranks = draw(st.integers(1, 4))
    step = st.tuples(
        st.sampled_from(["compute", "act", "give", "wait", "timer"]),
        st.integers(0, num_ranks - 1),
        st.integers(0, LONGEST),
    )
    return [draw(st.lists(step, max_size=8)) for _ in range(num_ranks)]


def scheduled(steps: list[list[Step]]) -> list[object]:
    """Run the steps under the scheduler, and return a log of what happened."""
    log: list[object] = []
    scheduler = new_scheduler(len(steps))
    tokens: list[list[float]] = [[] for _ in steps]  # for each rank, when its tokens may be taken

    def give(rank: int, at_s: float) -> None:
        if scheduler.ranks[rank].waits_in:
            scheduler.ready(scheduler.ranks[rank], at_s)
        else:
            tokens[rank].append(at_s)

    def ring(rank: int) -> None:
        log.append((scheduler.now_s, f"timer of {rank}"))
        give(rank, scheduler.now_s)

    def body(scheduler: Scheduler, rank: Rank) -> None:
        for what, other, duration in steps[rank.number]:
            if what == "compute":
                rank.clock_s += duration
                continue
            scheduler.act()
            log.append((rank.clock_s, rank.number, what))
            if what == "give":
                give(other, rank.clock_s + duration)
            elif what == "timer":
                scheduler.at(rank.clock_s + duration, partial(ring, other))
            elif what == "wait" and tokens[rank.number]:
                rank.clock_s = max(rank.clock_s, tokens[rank.number].pop(0))
            elif what == "wait":
                scheduler.block("a token")

    log.append(type(run(scheduler, body)).__name__)
    log.append([rank.clock_s for rank in scheduler.ranks])
    return log


def modelled(steps: list[list[Step]]) -> list[object]:
    """Return the expected log: earliest events come first; in ties, timers, then lower ranks."""
    log: list[object] = []
    clocks = [0.0] * len(steps)
    tokens: list[list[float]] = [[] for _ in steps]
    timers: list[tuple[float, int, int]] = []
    order, blocked, now = count(), set(), 0.0

    def give(rank: int, at_s: float) -> None:
        if rank in blocked:
            blocked.remove(rank)
            clocks[rank] = max(clocks[rank], at_s)
        else:
            tokens[rank].append(at_s)

    def live(rank: int) -> Iterator[None]:
        """Execute a rank's steps; yield wherever another rank may have to run first."""
        for what, other, duration in steps[rank]:
            if what == "compute":
                clocks[rank] += duration
                continue
            while clocks[rank] > now:
                yield
            log.append((clocks[rank], rank, what))
            if what == "give":
                give(other, clocks[rank] + duration)
            elif what == "timer":
                heapq.heappush(timers, (clocks[rank] + duration, next(order), other))
            elif what == "wait" and tokens[rank]:
                clocks[rank] = max(clocks[rank], tokens[rank].pop(0))
            elif what == "wait":
                blocked.add(rank)
                yield

    lives = {rank: live(rank) for rank in range(len(steps))}
    while lives or timers:
        ready = min(((clocks[r], r) for r in lives if r not in blocked), default=(NEVER, -1))
        if timers and timers[0][0] <= ready[0]:
            now, _, rank = heapq.heappop(timers)
            log.append((now, f"timer of {rank}"))
            give(rank, now)
        elif ready[1] < 0:
            return [*log, "Stuck", clocks]
        else:
            now = max(now, ready[0])
            if next(lives[ready[1]], "ended") == "ended":
                del lives[ready[1]]
    return [*log, "NoneType", clocks]


@given(programs())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_programs_do_what_a_model_without_threads_does(steps: list[list[Step]]) -> None:
    assert scheduled(steps) == modelled(steps)
