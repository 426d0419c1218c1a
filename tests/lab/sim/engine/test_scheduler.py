"""The scheduler alone: who runs when, what a deadlock is, and that no thread is left behind."""

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.sim.engine.patience import MAX_POLLS
from distlab.sim.engine.scheduler import (
    NEVER,
    Killed,
    Rank,
    Scheduler,
    Stopped,
    Strand,
)

TIMEOUT_S = 120.0
Body = Callable[[Scheduler, Rank], object]


class Stuck(Exception):
    """What the tests' worlds raise in a deadlock."""


def new_scheduler(num_ranks: int) -> Scheduler:
    return Scheduler(num_ranks, lambda _, __: None)


def run(scheduler: Scheduler, body: Body) -> BaseException | None:
    """Run to the end and return what was raised; fail if there is no end, or a thread is left."""
    before, raised = threading.active_count(), [None]

    def main() -> None:
        try:
            scheduler.run(partial(body, scheduler), Stuck)
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the scheduler hangs"
    assert threading.active_count() == before
    return raised[0]


# --- order ---------------------------------------------------------------------------------------


class Ticks:
    """A source with an event at each of the given times."""

    def __init__(self, times: Sequence[float], happen: Callable[[float], None]) -> None:
        self.times, self.happen = sorted(times), happen

    @property
    def next_event_s(self) -> float:
        return self.times[0] if self.times else NEVER

    def run_events(self, now_s: float) -> None:
        assert now_s == self.times.pop(0)
        self.happen(now_s)


def test_a_source_makes_things_happen_in_time() -> None:
    log: list[object] = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        for _ in range(3):
            rank.clock_s += 1.0
            scheduler.act()
            log.append(rank.number)

    scheduler = new_scheduler(1)
    scheduler.source = Ticks([0.5, 2.0, 2.5, 9.0], log.append)
    assert run(scheduler, body) is None
    assert log == [0.5, 0, 2.0, 0, 2.5, 0, 9.0]


# --- waiting -------------------------------------------------------------------------------------


def test_every_switch_is_reported() -> None:
    hands = []
    scheduler = Scheduler(3, lambda rank, to: hands.append((rank.number, to.number)))

    def body(scheduler: Scheduler, rank: Rank) -> None:
        for _ in range(2):
            rank.clock_s += 1.0
            scheduler.act()

    assert run(scheduler, body) is None
    starts, ends = [rank for rank, _ in hands], [rank for _, rank in hands]
    assert ends[:-1] == starts[1:]  # an unbroken chain
    assert all(rank != to for rank, to in hands)
    assert set(ends) == {0, 1, 2}


# --- how a world ends ----------------------------------------------------------------------------


def test_a_deadlock_is_known_at_once_and_every_rank_is_unwound() -> None:
    unwound = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            scheduler.block(f"recv of {rank.number}")
        except Exception:  # an except of the program must not stop the unwinding
            unwound.append("caught")
        finally:
            unwound.append(rank.number)

    scheduler = new_scheduler(4)
    assert isinstance(run(scheduler, body), Stuck)
    assert unwound == [0, 1, 2, 3]
    assert all(rank.has_ended for rank in scheduler.ranks)


def test_the_first_error_of_a_rank_ends_the_world() -> None:
    unwound = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            rank.clock_s += 4.0 - rank.number
            scheduler.act()
            if rank.number > 1:
                raise ValueError(f"rank {rank.number}")
            scheduler.block("for ever")
        finally:
            unwound.append(rank.number)
            raise KeyError("while it was unwound")

    error = run(new_scheduler(4), body)
    assert isinstance(error, KeyError)
    assert str(error.__context__) == "rank 3"
    assert sorted(unwound) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_even_what_is_not_an_exception_ends_the_world(error: BaseException) -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        if rank.number == 1:
            raise error
        scheduler.block("for ever")

    assert run(new_scheduler(2), body) is error


def test_a_rank_that_is_unwound_may_not_act_again() -> None:
    acted = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        if rank.number == 2:
            raise ValueError("boom")
        try:
            scheduler.block("for ever")
        except BaseException:
            scheduler.act()
            acted.append(rank.number)

    assert str(run(new_scheduler(3), body)) == "boom"
    assert acted == []


def test_a_rank_that_is_unwound_resumes_no_other() -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            if rank.number == 3:
                raise ValueError("boom")
            scheduler.block("for ever")
        finally:
            for other in scheduler.ranks:
                scheduler.ready(other, 0.0)

    assert str(run(new_scheduler(4), body)) == "boom"


def fail() -> None:
    raise ValueError("in an event")


def test_an_error_in_an_event_is_not_blamed_on_the_rank_that_waits() -> None:
    caught = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            scheduler.block("for ever")
        except Exception:
            caught.append(rank.number)

    scheduler = new_scheduler(2)
    scheduler.at(1.0, fail)
    assert str(run(scheduler, body)) == "in an event"
    assert caught == []


def test_an_error_in_the_report_of_a_deadlock_ends_the_world_too() -> None:
    raised: list[BaseException] = []

    def main() -> None:
        with pytest.raises(ValueError, match="in an event") as caught:
            scheduler.run(lambda _: scheduler.block("for ever"), fail)
        raised.append(caught.value)

    scheduler = new_scheduler(2)
    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert len(raised) == 1, "the scheduler hangs"


def test_a_rank_is_also_killed_while_it_waits() -> None:
    ends = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            if rank.number == 0:
                scheduler.block("for ever")
            rank.clock_s = 3.0
            scheduler.act()
        finally:
            ends.append((rank.number, rank.clock_s))

    scheduler = new_scheduler(2)
    scheduler.at(1.0, lambda: scheduler.kill(scheduler.ranks[0]))
    assert run(scheduler, body) is None
    assert ends == [(0, 1.0), (1, 3.0)]


def test_a_killed_rank_does_nothing_more_in_its_clean_up() -> None:
    acted = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        for attempt in (lambda: scheduler.block("for ever"), scheduler.act, scheduler.act):
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

Step = tuple[str, int, int]  # what, which rank, how long
LONGEST = 3


@st.composite
def programs(draw: st.DrawFn) -> list[list[Step]]:
    """For every rank: compute, act, give a token (later), wait for one, set a timer."""
    num_ranks = draw(st.integers(1, 4))
    step = st.tuples(
        st.sampled_from(["compute", "act", "give", "wait", "timer"]),
        st.integers(0, num_ranks - 1),
        st.integers(0, LONGEST),
    )
    return [draw(st.lists(step, max_size=8)) for _ in range(num_ranks)]


def scheduled(steps: list[list[Step]]) -> list[object]:
    """What happens under the scheduler."""
    log: list[object] = []
    scheduler = new_scheduler(len(steps))
    tokens: list[list[float]] = [[] for _ in steps]  # the times from which they may be taken

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
    """What should happen: the earliest always goes on, events first, then ranks by number."""
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
        """Yield wherever another rank may be earlier."""
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
@settings(max_examples=300, deadline=None, derandomize=True)
def test_random_programs_do_what_a_model_without_threads_does(steps: list[list[Step]]) -> None:
    assert scheduled(steps) == modelled(steps)


# --- limits on waiting ---------------------------------------------------------------------------


def test_who_waits_too_long_goes_on_at_the_limit() -> None:
    outcomes = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        if rank.number == 0:
            outcomes.append((scheduler.block("a recv", until_s=2.0), rank.clock_s))
            outcomes.append((scheduler.block("another", until_s=1.0), rank.clock_s))  # over already
        else:
            rank.clock_s = 5.0
            scheduler.act()

    assert run(new_scheduler(2), body) is None
    assert outcomes == [(False, 2.0), (False, 2.0)]


def test_a_limit_that_is_not_reached_takes_no_time() -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        if rank.number == 0:
            assert scheduler.block("a recv", until_s=1000.0)
        else:
            rank.clock_s = 3.0
            scheduler.act()
            scheduler.ready(scheduler.ranks[0], 4.0)

    scheduler = new_scheduler(2)
    assert run(scheduler, body) is None
    assert (scheduler.ranks[0].clock_s, scheduler.now_s) == (4.0, 4.0)


def test_a_limit_is_no_deadlock_and_waiting_without_one_is() -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        if rank.number == 0:
            scheduler.block("a recv", until_s=2.0)
        scheduler.block("for ever")

    scheduler = new_scheduler(2)
    assert isinstance(run(scheduler, body), Stuck)
    assert scheduler.ranks[0].clock_s == 2.0


# --- asking in vain ------------------------------------------------------------------------------


def asks(scheduler: Scheduler, rank: Rank, times: int) -> int:
    for asked in range(times):
        rank.clock_s += 1e-6
        scheduler.poll(lambda: "an answer")
        if scheduler.is_stopping:
            return asked
    return times


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_asking_in_vain_is_a_deadlock(num_ranks: int) -> None:
    waited_for = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        try:
            if rank.number == num_ranks - 1 > 0:
                scheduler.block("a recv")
            asks(scheduler, rank, 10 * MAX_POLLS)
        except Stopped:
            waited_for.append(rank.number)
            raise

    assert isinstance(run(new_scheduler(num_ranks), body), Stuck)
    assert sorted(waited_for) == [*range(num_ranks)]


def test_who_asks_less_often_is_patient_enough() -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        assert asks(scheduler, rank, MAX_POLLS - 1) == MAX_POLLS - 1

    assert run(new_scheduler(1), body) is None


def test_asking_is_not_in_vain_while_somebody_computes() -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        if rank.number == 0:
            asks(scheduler, rank, 2 * MAX_POLLS)
        else:
            rank.clock_s = 1.0
            scheduler.act()

    assert run(new_scheduler(2), body) is None


# --- threads of a rank ---------------------------------------------------------------------------


def start_thread(
    scheduler: Scheduler, body: Callable[[], None], *, is_daemon: bool = False
) -> Strand:
    strand = scheduler.spawn("second", is_daemon=is_daemon)
    thread = threading.Thread(target=scheduler.be, args=(strand, body), daemon=True)
    thread.start()
    strand.ident = thread.ident or 0
    return strand


def test_strands_of_a_rank_run_in_the_order_of_their_clocks() -> None:
    log = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        def second() -> None:
            for _ in range(3):
                scheduler.current.clock_s += 2
                scheduler.act()
                log.append((scheduler.current.clock_s, "second"))

        strand = start_thread(scheduler, second)
        for _ in range(2):
            rank.clock_s += 3
            scheduler.act()
            log.append((rank.clock_s, "first"))
        assert (strand.rank, strand.number, strand.order) == (rank, rank.number, 1)

    scheduler = new_scheduler(1)
    assert run(scheduler, body) is None
    assert log == [(2, "second"), (3, "first"), (4, "second"), (6, "first"), (6, "second")]
    assert scheduler.ranks[0].has_left


def test_a_daemon_ends_with_its_rank_and_others_do_not() -> None:
    log = []

    def body(scheduler: Scheduler, rank: Rank) -> None:
        def go_on(name: str) -> None:
            for _ in range(4):
                scheduler.current.clock_s += 1
                scheduler.act()
                log.append(name)

        start_thread(scheduler, partial(go_on, "daemon"), is_daemon=True)
        start_thread(scheduler, partial(go_on, "other"))
        rank.clock_s = 2.5
        scheduler.act()

    assert run(new_scheduler(1), body) is None
    assert Counter(log) == {"daemon": 2, "other": 4}


def test_a_rank_waits_for_the_end_of_a_thread() -> None:
    def body(scheduler: Scheduler, rank: Rank) -> None:
        def work() -> None:
            scheduler.current.clock_s += 7

        strand = start_thread(scheduler, work)
        strand.waiting.append(rank)
        assert scheduler.block("its end")
        assert (strand.has_ended, rank.clock_s) == (True, 7)

    assert run(new_scheduler(1), body) is None
