"""Judges tasks 4.5, 4.7 and 4.8: lost, waiting and slow ranks, joint stops, and save intervals."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, expm1, sqrt
from random import Random
from statistics import median_low
from typing import Any, NamedTuple

import pytest

from distlab.grade import Grade, check, check_cost, task
from judging.checks import check_silent, uneven
from judging.expect import check_small, expect, expect_on_all_ranks, results_in_group
from phase4 import fault_tolerance as b
from phase4.fault_tolerance import Event, Plan, Poll

# Task 4.5: random stories are compared with a model of the monitor, poll by poll

DEFAULTS = {"slow_factor": 2.0, "patience": 3}
OPTIONS: Sequence[Mapping[str, float]] = ({}, {"patience": 2}, {"slow_factor": 4.0, "patience": 1})
CAUSES = {  # likely causes of a wrong status, by the right status
    "silent": "Its silence is above timeout_s and no rank has a lower step, so it is gone, or all "
    "pause. A rank that has never reported has the step -1, and timeout_s from the start of the "
    "monitor.",
    "waiting": "Its silence is above timeout_s, whatever its speed was, and the step of another "
    "rank is lower: it has come to the collective of a later step, and waits there for the rank "
    "that is gone.",
    "slow": "A poll first reads all reports, and then judges each new one against all newest.",
    "alive": "A rank is silent if its silence is above timeout_s, not if it is equal; and slow "
    "after patience slow reports in a row, where a poll without a new report counts nothing. A "
    "rank that reports again is alive again.",
}
NOT_ZERO = (
    "Some ranks have not reported yet. They do not count in the median; counted with a busy_s of "
    "0, they pull it down, and reports that are not slow look slow."
)
SILENCE = (
    "silent_s counts on the monitor's clock, from the poll that has seen the last report first "
    "(so no two reports may be equal), and before the first report from the start of the monitor."
)


class Story(NamedTuple):
    """Events that happen to some ranks and their monitor, and the monitor's options."""

    num_ranks: int
    events: Sequence[Event]
    options: Mapping[str, float]


def draw(random: Random, num_events: int) -> Story:
    """Draw a story in which one rank is slow in most steps, and some ranks end halfway.

    All times are multiples of 2.5 s, so that silences often equal the timeout exactly, and all
    busy_s are powers of two, so that one is often exactly twice another.
    """
    num_ranks = random.randint(2, 5)
    steps, slow = [0] * num_ranks, random.randrange(num_ranks)
    ends = [random.choice([num_events, num_events // 2]) for _ in range(num_ranks)]
    events: list[Event] = [("wait", 2.5 * random.randint(0, 5))]
    while len(events) < num_events:
        events += [("poll",), ("wait", random.choice([0.0, 2.5, 2.5, 5.0]))]
        for rank in random.sample(range(num_ranks), num_ranks):
            if random.random() < 0.5 and len(events) < ends[rank]:
                usual_s = 1.0 if rank == slow else 0.25
                busy_s = random.choice([*[usual_s] * 4, 0.5, 1.0])
                events.append(("beat", rank, steps[rank], busy_s))
                steps[rank] += random.choice([0, 1, 1])
    return Story(num_ranks, [*events, ("poll",)], {"timeout_s": 10.0, **random.choice(OPTIONS)})


class _Rank:
    """A monitor's knowledge about one rank."""

    def __init__(self) -> None:
        self.seen_s, self.step = 0.0, -1
        self.unseen: tuple[int, float] | None = None  # step and busy_s of a newer report
        self.busy_s: float | None = None
        self.was_slow: list[bool] = []  # one entry per report seen

    def status(self, ranks: Sequence["_Rank"], now_s: float, options: Mapping[str, float]) -> str:
        """Return the rank's right status."""
        if now_s - self.seen_s > options["timeout_s"]:
            return "waiting" if any(rank.step < self.step for rank in ranks) else "silent"
        last = self.was_slow[-int(options["patience"]) :]
        return "slow" if len(last) == options["patience"] and all(last) else "alive"


def expected(story: Story, *, is_zero_counted: bool = False) -> Iterator[tuple[int, Poll]]:
    """Yield each poll's position among the events, and its right result.

    With ``is_zero_counted``, yield the results of a monitor that counts ranks without a report.
    """
    ranks, now_s = [_Rank() for _ in range(story.num_ranks)], 0.0
    options = {**DEFAULTS, **story.options}
    for place, (kind, *values) in enumerate(story.events, start=1):
        if kind == "wait":
            now_s += values[0]
        elif kind == "beat":
            ranks[values[0]].unseen = values[1], values[2]
        else:
            _see(ranks, now_s, options["slow_factor"], is_zero_counted)
            yield (
                place,
                [
                    (number, rank.step, now_s - rank.seen_s, rank.status(ranks, now_s, options))
                    for number, rank in enumerate(ranks)
                ],
            )


def _see(ranks: Sequence[_Rank], now_s: float, factor: float, is_zero_counted: bool) -> None:
    new = [rank for rank in ranks if rank.unseen]
    for rank in new:
        assert rank.unseen is not None
        rank.seen_s, (rank.step, rank.busy_s), rank.unseen = now_s, rank.unseen, None
    times_s = [rank.busy_s for rank in ranks if rank.busy_s is not None]
    silent_s = [0.0] * (len(ranks) - len(times_s)) if is_zero_counted else []
    median_s = median_low([*times_s, *silent_s] or [0.0])
    for rank in new:
        assert rank.busy_s is not None
        rank.was_slow.append(rank.busy_s > factor * median_s)


def difference(story: Story, polls: Sequence[Poll]) -> tuple[int, str] | None:
    """Return the number of events up to the first wrong poll and a description of it, or None."""
    models = zip(expected(story), expected(story, is_zero_counted=True), polls, strict=True)
    for (place, right), (_, with_zeros), poll in models:
        for rank, (wanted, actual) in enumerate(zip(right, poll, strict=True)):
            if tuple(actual) != wanted:
                _, step, silent_s, status = wanted
                cause = NOT_ZERO if [*map(tuple, poll)] == with_zeros else CAUSES[status]
                return place, (
                    f"its last poll should say of rank {rank}: step {step}, silent_s {silent_s}, "
                    f"{status!r}; it says: step {actual[1]}, silent_s {actual[2]}, {actual[3]!r}. "
                    f"{cause if silent_s == actual[2] else SILENCE}"
                )
    return None


def in_words(story: Story, num_events: int, most: int = 14) -> str:
    """Describe a story up to event ``num_events``, with no more than the last ``most`` events."""
    events = [event for event in story.events[:num_events] if event != ("wait", 0.0)]
    omitted = "… → " if len(events) > most else ""
    options = ", ".join(f"{name}={value:g}" for name, value in story.options.items())
    last = " → ".join(_event_in_words(event) for event in events[-most:])
    return f"{story.num_ranks} ranks, {options}: {omitted}{last}"


def _event_in_words(event: Event) -> str:
    kind, *values = event
    if kind == "beat":
        rank, step, busy_s = values
        return f"rank {rank} reports step {step}, busy_s {busy_s}"
    return f"{values[0]:g} s" if kind == "wait" else "poll"


@task("4.5")
def test_what_a_monitor_says(grade: Grade) -> None:
    stories = [draw(grade.random, num_events) for num_events in (20, 80) for _ in range(60)]
    wrong = []
    for story, polls in zip(stories, grade.call(b.watch_all, stories), strict=True):
        _check_ranks(polls, story.num_ranks)
        if wrong_poll := difference(story, polls):
            wrong.append((*wrong_poll, story))
    if wrong:
        # Report the shortest failure, which is the clearest.
        length, text, story = min(wrong, key=lambda failure: failure[0])
        check(False, f"{in_words(story, length)}: {text}")


def _check_ranks(polls: Sequence[Poll], num_ranks: int) -> None:
    for poll in polls:
        check(
            bool(poll),
            "poll waited for a rank that has not reported yet: store.get waits until its key is "
            "there. Ask store.check first.",
        )
        ranks = [rank for rank, *_ in poll]
        check(
            ranks == [*range(num_ranks)],
            f"poll should say what each of {num_ranks} ranks does, in order; it names {ranks}.",
        )


@task("4.5")
def test_messages_to_the_store(grade: Grade) -> None:
    calls = grade.call(b.send, 3, 3)
    of_report = (
        "A rank that waits for an answer makes the step longer: number the reports on the rank "
        "itself."
    )
    of_poll = "Two for each rank are enough, to look whether there is a report and to read it."
    for kind, most, cause in (("report", 1, of_report), ("poll", 2 * 3, of_poll)):
        for names in calls[kind]:
            check_cost(
                len(names) <= most,
                f"a {kind} of 3 ranks called {len(names)} methods of the store, {names}; "
                f"{most} should be enough. {cause}",
            )


# Task 4.7: one step after which all ranks stop, signal handlers, and leaving


TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
EXIT_STOPPED = 75
STUCK = (
    "All ranks ask in every step, and all of them leave in the same one: a rank that stops because "
    "a signal has come to it alone leaves the others waiting in their next collective."
)


def _in_words(plan: Plan) -> str:
    arrivals = [f"{signal.Signals(n).name} to rank {r} in step {s}" for r, s, n in plan.arrivals]
    return " and ".join(arrivals) or "no signal"


def _check_answers(plan: Plan, by_rank: Sequence[Any]) -> None:
    signals = plan.signals or (TERM, USR1)
    arrivals = [step for _, step, number in plan.arrivals if number in signals]
    first = min(arrivals, default=plan.num_steps)
    for rank, facts in enumerate(by_rank):
        where = f"{_in_words(plan)}: rank {rank} of {len(by_rank)}"
        expect(
            f"{where}: the steps that are computed",
            *(facts["computed"], [*range(plan.num_steps)]),
            "A handler only notes that the signal has come; the step goes on to its end.",
        )
        expect(
            f"{where}: the answers of agreed(), step by step,",
            *(facts["answers"], [step >= first for step in range(plan.num_steps)]),
            "The answer is the same on all ranks, and true as soon as one of them has got one of "
            "the signals that are given, by default SIGTERM and SIGUSR1; it stays true.",
        )
        is_caught = all(number in signals for _, _, number in plan.arrivals)
        _check_handlers(facts if is_caught else {**facts, "let through": []}, where)


def _check_handlers(facts: Any, where: str) -> None:
    check(
        not facts["changed"],
        f"{where} no longer handles {' and '.join(facts['changed'])} as before the with "
        "statement, by a function of the caller's or not at all. signal.signal returns the handler "
        "that was there: keep it in __enter__, and put it back in __exit__.",
    )
    check(
        not facts["let through"],
        f"{where}: {' and '.join(facts['let through'])}. From the beginning of the with statement "
        "to its end, also while leave saves and however often one comes, a signal is noted, and "
        "nothing else: whatever handled it before might end the rank in the middle of a step.",
    )


def _train(grade: Grade, num_ranks: int, plan: Plan) -> None:
    options = uneven(grade.random, num_ranks)
    run = grade.run(b.train, num_ranks, plan, options=options, if_stuck=STUCK)
    _check_answers(plan, run.results)
    if grade.is_simulated:
        steps = plan.num_steps
        check_small(run, steps, 8 * steps, f"StopRequest.agreed, in {steps} steps,")


@task("4.7", real=True)
def test_all_ranks_stop_after_the_same_step(grade: Grade) -> None:
    rank, step = grade.random.randrange(3), grade.random.randrange(1, 4)
    _train(grade, 3, Plan(((rank, step, TERM),)))


PLANS = {
    "no signal": (3, Plan()),
    "one rank": (1, Plan(((0, 2, TERM),))),
    "several of five ranks": (5, Plan(((3, 3, TERM), (1, 2, USR1), (1, 3, TERM)))),
    "all ranks, some of them again": (
        *(3, Plan((*((rank, 1, TERM) for rank in range(3)), (1, 1, TERM), (2, 3, TERM)))),
    ),
    "SIGUSR1": (2, Plan(((1, 2, USR1),))),
    "SIGUSR2, which is given": (2, Plan(((0, 2, USR2),), signals=(USR2,))),
    "SIGUSR2, which is left to the caller": (2, Plan(((0, 1, USR2),))),
}


@task("4.7")
@pytest.mark.parametrize("what", PLANS)
def test_signals_of_all_kinds(grade: Grade, what: str) -> None:
    _train(grade, *PLANS[what])


@task("4.7", real=True)
def test_a_signal_that_comes_while_ranks_wait(grade: Grade) -> None:
    run = grade.run(b.train_while_others_wait, 3, 0, 2, if_stuck=STUCK)
    expect_on_all_ranks("the answers of agreed()", run.results, run.results[0])
    answers = run.results[0]
    check(
        not answers[0] and answers[2:] == [True, True],
        "rank 2 got SIGTERM while it waited for rank 0 in the agreed() of step 1. All ranks should "
        f"hear True from step 2 on at the latest; they hear {answers}. Don't write the answer over "
        "a flag that the handler has set meanwhile.",
    )


@task("4.7")
def test_handlers_come_back_also_after_an_error(grade: Grade) -> None:
    facts = grade.call(b.fail)
    cause = "Nothing is caught before the with statement begins."
    expect("the signals that StopRequest() itself handles", facts["too early"], [], cause)
    check(
        facts["came out"],
        "an error in a step, inside of the with statement, should come out of it; it does not. "
        "__exit__ returns None: with a true value it swallows all errors of training, and the "
        "SystemExit of leave too, so that the run looks finished.",
    )
    _check_handlers(facts, "after an error inside of the with statement, rank 0")


@task("4.7")
def test_a_save_that_fails(grade: Grade) -> None:
    error = grade.call(b.fail_to_save)
    check(
        error == "OSError",
        "save raised OSError (no space left), which should come out of leave; out came "
        f"{error or 'nothing'}. An exit with {EXIT_STOPPED} says that nothing has failed.",
    )


@task("4.7", real=True)
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["one signal", "two signals"])
def test_ranks_leave_when_all_have_saved(grade: Grade, is_interrupted: bool) -> None:
    plan = Plan(((1, 0, TERM),), leaves=True, is_interrupted=is_interrupted)
    _check_leaving(grade.run(b.train, 3, plan, if_stuck=STUCK).results)


@task("4.7")
def test_stopping_inside_a_group(grade: Grade) -> None:
    plan = Plan(((2, 1, TERM),), num_steps=3)
    _check_answers(plan, results_in_group(grade, b.train, plan))
    _check_leaving(results_in_group(grade, b.train, plan._replace(leaves=True)))


def _check_leaving(by_rank: Sequence[Any]) -> None:
    for rank, facts in enumerate(by_rank):
        where = f"rank {rank} of {len(by_rank)}"
        expect(
            f"{where}: the code of the SystemExit of leave",
            *(facts["code"], EXIT_STOPPED),
            "It is EXIT_STOPPED of given.py (None: leave has returned, or __exit__ has swallowed "
            "the exit).",
        )
        _check_handlers(facts, where)
        expect(f"{where}: the number of saves", len(facts["saved_s"]), 1)
    last, first = max(f["saved_s"][0] for f in by_rank), min(f["left_s"] for f in by_rank)
    check(
        first >= last,
        f"a rank left {1e3 * (last - first):.1f} ms before the last one had saved. After its save, "
        "a rank waits for those of all others: torchrun ends all ranks when the first one has "
        "exited, whether they have saved or not.",
    )


# Task 4.8: the two intervals, and the expected duration

DAY_S = 86_400.0
NODES = (
    "A job that needs all of its nodes fails as soon as one of them does: N nodes fail N times as "
    "often as one, so that M = node_mtbf_s / num_nodes."
)


def _young_s(save_s: float, mtbf_s: float) -> float:
    return sqrt(2 * save_s * mtbf_s)


def _daly_s(save_s: float, mtbf_s: float) -> float:
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return _young_s(save_s, mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


INTERVALS: dict[str, tuple[Callable[[float, float], float], str]] = {
    "young_interval_s": (
        _young_s,
        "It is the square root of twice the save times the mean time between failures.",
    ),
    "daly_interval_s": (
        _daly_s,
        "Below δ = 2M, Young's interval is multiplied by 1 + ⅓ √(δ / 2M) + ⅑ · δ / 2M; then δ is "
        "subtracted, because the interval is that of the training alone. From δ = 2M on, the "
        "interval is M.",
    ),
}
JOBS = [  # save_s, node_mtbf_s, num_nodes
    *((2, 100, 1), (0.5, 7200, 1), (60, 60, 1), (30, 16, 1)),
    *((60, 30, 1), (100, 3 * DAY_S, 8000), (300, 900, 6)),  # δ is at least 2M
    *((60, 30 * DAY_S, 1000), (180, 5 * 365 * DAY_S, 16_384), (5, 1e5, 3)),
]


@task("4.8")
@pytest.mark.parametrize("function", INTERVALS)
def test_the_interval(grade: Grade, function: str) -> None:
    _check_seconds(grade, function, JOBS, *INTERVALS[function], 1e-9)


RUNS = [  # work_s, interval_s, save_s, restart_s, node_mtbf_s, num_nodes
    (1000.0, 20.0, 2.0, 10.0, 100.0, 1),
    (1000.0, 20.0, 2.0, 0.0, 100.0, 1),
    (500.0, 7.5, 0.0, 30.0, 40.0, 1),
    (DAY_S, 518.0, 60.0, 300.0, 30 * DAY_S, 1000),
    (DAY_S, 60.0, 1e-3, 10.0, 1e12, 2),
]


def _duration_s(
    work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float
) -> float:
    attempt_s = mtbf_s * expm1((interval_s + save_s) / mtbf_s)
    return attempt_s * exp(restart_s / mtbf_s) * work_s / interval_s


@task("4.8")
def test_how_long_a_run_takes(grade: Grade) -> None:
    cause = (
        "There are T/τ intervals. What each takes follows from two facts in the guidelines: its "
        "first try lasts for τ + δ or until a failure; if it fails, R + τ + δ must pass without a "
        "failure, as often as that takes. The first try has no restart."
    )
    _check_seconds(grade, "expected_duration_s", RUNS, _duration_s, cause, 1e-4)


def _check_seconds(
    grade: Grade,
    function: str,
    calls: Sequence[tuple[float, ...]],
    formula: Callable[..., float],
    cause: str,
    tolerance: float,
) -> None:
    run = grade.run(b.seconds, 1, function, calls)
    check_silent(run, function)
    for call, answer_s in zip(calls, run.results[0], strict=True):
        *times_s, node_mtbf_s, num_nodes = call
        right_s = formula(*times_s, node_mtbf_s / num_nodes)
        what = f"{function}({', '.join(f'{number:g}' for number in call)})"
        why = f"{cause} {NODES}" if num_nodes > 1 else cause
        expect(what, answer_s, right_s, why, tolerance * right_s)
