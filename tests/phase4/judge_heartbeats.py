"""Judges task 4.5: who is gone, who waits, who is slow, and that nobody is blamed wrongly."""

from collections.abc import Sequence

import pytest

from distlab.grade import Grade, check, task
from phase4 import health_stories as stories
from phase4 import heartbeats as b
from phase4.heartbeats import Event

TIMEOUT_S = 10.0
Told = list[tuple[int, int, float, str]]


def _steps(num_ranks: int, steps: Sequence[int], busy_s: float = 0.1) -> list[Event]:
    """Let all ranks report each step, a second apart, with a poll after each."""
    events: list[Event] = []
    for step in steps:
        events += [("beat", rank, step, busy_s) for rank in range(num_ranks)]
        events += [("poll",), ("wait", 1.0)]
    return events


def _watch(grade: Grade, num_ranks: int, events: Sequence[Event], **options: float) -> list[Told]:
    polls: list[Told] = grade.call(b.watch, num_ranks, events, {"timeout_s": TIMEOUT_S, **options})
    _check_polls(polls, num_ranks)
    return polls


def _check_polls(polls: Sequence[Told], num_ranks: int) -> None:
    for told in polls:
        check(
            bool(told),
            "poll waited for a rank that has not reported yet: store.get waits until its key is "
            "there. Ask store.check first.",
        )
        check(
            [rank for rank, *_ in told] == [*range(num_ranks)],
            f"poll should tell of each of {num_ranks} ranks, in order; it tells of "
            f"{[rank for rank, *_ in told]}.",
        )


def _statuses(told: Told) -> list[str]:
    return [status for *_, status in told]


@task("4.5")
@pytest.mark.parametrize(("num_ranks", "gone"), [(3, 1), (2, 0), (5, 4), (8, 3)])
def test_a_rank_that_is_gone_is_told_from_those_that_wait(
    grade: Grade, num_ranks: int, gone: int
) -> None:
    events = _steps(num_ranks, [0, 1, 2])
    events += [("beat", rank, 3, 0.1) for rank in range(num_ranks) if rank != gone]
    events += [("poll",), ("wait", 9.5), ("poll",), ("wait", 1.0), ("poll",)]
    *_, early, late = _watch(grade, num_ranks, events)
    expected = ["silent" if rank == gone else "waiting" for rank in range(num_ranks)]
    where = f"rank {gone} of {num_ranks} reported step 2, and the others step 3; then nobody did"
    check(
        _statuses(late) == expected,
        f"{where} for longer than timeout_s: the statuses should be {expected}; they are "
        f"{_statuses(late)}. The others have come to the collective of step 3, and wait for it.",
    )
    check(
        _statuses(early)[gone] == "silent" and {*_statuses(early)} == {"silent", "alive"},
        f"{where} for 9.5 s: rank {gone} has been silent for 10.5 s, above timeout_s, the others "
        f"for less, and are alive; the statuses are {_statuses(early)}.",
    )


@task("4.5")
def test_step_and_seconds_of_silence(grade: Grade) -> None:
    events: list[Event] = [("poll",), ("wait", 2.0), ("poll",), ("beat", 0, 4, 0.1), ("wait", 1.0)]
    events += [("poll",), ("wait", 3.0), ("poll",)]
    told = [[entry[:3] for entry in poll] for poll in _watch(grade, 2, events)]
    expected = [
        [(0, -1, 0.0), (1, -1, 0.0)],
        [(0, -1, 2.0), (1, -1, 2.0)],
        [(0, 4, 0.0), (1, -1, 3.0)],
        [(0, 4, 3.0), (1, -1, 6.0)],
    ]
    for place, (found, right) in enumerate(zip(told, expected, strict=True), start=1):
        check(
            [*map(tuple, found)] == right,
            f"poll {place}: rank, step and silent_s should be {right}; they are {found}. silent_s "
            "counts on the monitor's clock, from the poll that has seen the report first, and "
            "before the first report from the start of the monitor.",
        )


@task("4.5")
def test_a_rank_that_never_reports(grade: Grade) -> None:
    events: list[Event] = [("poll",), ("wait", 9.9), ("beat", 0, 0, 0.1), ("poll",)]
    events += [("wait", 0.2), ("poll",)]
    _, before, after = _watch(grade, 2, events)
    check(
        _statuses(before) == ["alive", "alive"],
        "before its first report, a rank has timeout_s from the start of the monitor; after 9.9 of "
        f"10 s the statuses are {_statuses(before)}.",
    )
    check(
        _statuses(after) == ["alive", "silent"],
        f"rank 1 has not reported for 10.1 s after the start: {_statuses(after)} should be "
        "['alive', 'silent'].",
    )


@task("4.5")
def test_no_alarm_while_reports_come_in_time(grade: Grade) -> None:
    random, num_ranks = grade.random, 4
    events: list[Event] = []
    for step in range(30):
        for rank in random.sample(range(num_ranks), num_ranks):
            events += [("wait", random.uniform(0, 2.4)), ("beat", rank, step, 0.1), ("poll",)]
    for told in _watch(grade, num_ranks, events, timeout_s=20.0):
        check(
            {*_statuses(told)} == {"alive"},
            "each rank reports at least every 20 s, and timeout_s is 20; nobody should be blamed, "
            f"but the statuses are {_statuses(told)}.",
        )


@task("4.5")
def test_a_pause_of_all_ranks(grade: Grade) -> None:
    events = [*_steps(3, [0, 1]), ("wait", 8.9), ("poll",), ("wait", 0.2), ("poll",)]
    events += _steps(3, [2])
    *_, short, long, again = _watch(grade, 3, events)
    check(
        _statuses(short) == ["alive"] * 3,
        f"all ranks pause for 9.9 s, less than timeout_s: the statuses are {_statuses(short)}.",
    )
    check(
        _statuses(long) == ["silent"] * 3,
        "all ranks have been silent since the same step, for longer than timeout_s: none waits for "
        f"another that is behind it, so all are silent; the statuses are {_statuses(long)}.",
    )
    check(
        _statuses(again) == ["alive"] * 3,
        f"all ranks report again, and should be alive; the statuses are {_statuses(again)}.",
    )


@task("4.5")
def test_reports_of_the_same_step(grade: Grade) -> None:
    events: list[Event] = []
    for _ in range(4):
        events += [("beat", 0, 7, 0.1), ("beat", 1, 7, 0.1), ("poll",), ("wait", 6.0)]
    for told in _watch(grade, 2, events):
        check(
            _statuses(told) == ["alive", "alive"],
            "two ranks report every 6 s, always step 7 with the same busy_s; timeout_s is 10, so "
            f"they are alive; the statuses are {_statuses(told)}. No two reports may be equal.",
        )


@task("4.5")
@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_a_slow_rank(grade: Grade, num_ranks: int) -> None:
    slow = grade.random.randrange(num_ranks)
    events: list[Event] = []
    for step, busy_s in enumerate([0.1, 0.5, 0.5, 0.5, 0.5, 0.1]):
        for rank in range(num_ranks):
            events.append(("beat", rank, step, busy_s if rank == slow else 0.1))
        events += [("poll",), ("poll",), ("wait", 1.0)]
    told = [_statuses(poll) for poll in _watch(grade, num_ranks, events)]
    expected = ["alive"] * 6 + ["slow"] * 4 + ["alive"] * 2
    check(
        [statuses[slow] for statuses in told] == expected,
        f"rank {slow} of {num_ranks} works 0.1 s in its first and last step and 0.5 s in four "
        f"between, the others always 0.1 s; each step is polled twice. Its status should be "
        f"{expected}; it is {[statuses[slow] for statuses in told]}. It takes patience = 3 slow "
        "reports in a row, and one that is not slow ends that; a poll without a new report counts "
        "nothing.",
    )
    others = {status for statuses in told for rank, status in enumerate(statuses) if rank != slow}
    check(others == {"alive"}, f"the other ranks are alive; they were {sorted(others)}.")


@task("4.5")
def test_single_slow_steps_are_no_reason(grade: Grade) -> None:
    events: list[Event] = []
    for step in range(12):
        late = step % 3
        events += [("beat", rank, step, 0.9 if rank == late else 0.1) for rank in range(3)]
        events += [("poll",), ("wait", 1.0)]
    for told in _watch(grade, 3, events):
        check(
            _statuses(told) == ["alive"] * 3,
            "in each step another rank takes long: no rank is slow in 3 reports in a row; the "
            f"statuses are {_statuses(told)}.",
        )


@task("4.5")
def test_factor_and_patience(grade: Grade) -> None:
    events: list[Event] = []
    for step in range(2):
        events += [("beat", rank, step, 0.35 if rank == 2 else 0.1) for rank in range(3)]
        events += [("poll",)]
    first, second = _watch(grade, 3, events, slow_factor=3.0, patience=2)
    check(
        (_statuses(first)[2], _statuses(second)[2]) == ("alive", "slow"),
        "with slow_factor=3 and patience=2, a rank that works 0.35 s where the median is 0.1 s is "
        f"slow after its second report; its statuses are {[_statuses(first)[2]]} and "
        f"{[_statuses(second)[2]]}.",
    )
    (*_, told) = _watch(grade, 3, events, slow_factor=4.0, patience=1)
    check(
        _statuses(told)[2] == "alive",
        "with slow_factor=4, 0.35 s are not slow where the median is 0.1 s; the status is "
        f"{_statuses(told)[2]}.",
    )


@task("4.5")
def test_what_is_told_in_stories_drawn_at_random(grade: Grade) -> None:
    drawn = [stories.draw(grade.random, 80) for _ in range(80)]
    differences = []
    for story, polls in zip(drawn, grade.call(b.watch_all, drawn, stories.OPTIONS), strict=True):
        _check_polls(polls, story.num_ranks)
        if difference := stories.compare(story, polls):
            differences.append((difference.num_events, difference.text, story))
    if differences:
        length, text, story = min(differences, key=lambda found: found[0])  # says most
        check(
            False,
            f"{story.num_ranks} ranks, patience=2: {stories.told_of(story, length)}: {text} A poll "
            "first reads all reports, and then judges each new one against all newest.",
        )


@task("4.5")
def test_messages_to_the_store(grade: Grade) -> None:
    found = grade.call(b.send, 3, 3)
    for calls in found["reports"]:
        check(
            len(calls) == 1,
            f"a report called {calls} of the store; it should be one message. Every answer that a "
            "rank waits for makes the step longer: number the reports on the rank itself.",
        )
    for calls in found["polls"]:
        check(
            len(calls) <= 2 * 3,
            f"a poll of 3 ranks called {len(calls)} methods of the store, {calls}; two for each "
            "rank are enough, to look whether there is a report and to read it.",
        )
