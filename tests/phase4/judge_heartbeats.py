"""Judges task 4.5: ranks that are gone, that wait or are slow, and none that is blamed wrongly.

Stories drawn at random are compared with a model of the monitor, poll by poll.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from statistics import median_low
from typing import NamedTuple

from distlab.grade import Grade, check, task
from phase4 import heartbeats as b
from phase4.heartbeats import Event, Poll

DEFAULTS = {"slow_factor": 2.0, "patience": 3}
OPTIONS: Sequence[Mapping[str, float]] = ({}, {"patience": 2}, {"slow_factor": 4.0, "patience": 1})
CAUSES = {  # likely causes of a wrong status, by the right one
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
SILENCE = (
    "silent_s counts on the monitor's clock, from the poll that has seen the last report first "
    "(so no two reports may be equal), and before the first report from the start of the monitor."
)


class Story(NamedTuple):
    """Events that happen to some ranks and their monitor, and the options of the monitor."""

    num_ranks: int
    events: Sequence[Event]
    options: Mapping[str, float]


def draw(random: Random, num_events: int) -> Story:
    """Draw a story: one rank is slow in most steps, and some ranks end half-way.

    All times are multiples of 2.5 s, so that a silence is often as long as the timeout, to the bit;
    and all busy_s are powers of two, so that one is often exactly twice another.
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
    """The knowledge of a monitor about a rank."""

    def __init__(self) -> None:
        self.seen_s, self.step = 0.0, -1
        self.unseen: tuple[int, float] | None = None  # step and busy_s of a newer report
        self.busy_s: float | None = None
        self.was_slow: list[bool] = []  # one for each report that was seen

    def status(self, ranks: Sequence["_Rank"], now_s: float, options: Mapping[str, float]) -> str:
        """Return the right status."""
        if now_s - self.seen_s > options["timeout_s"]:
            return "waiting" if any(rank.step < self.step for rank in ranks) else "silent"
        last = self.was_slow[-int(options["patience"]) :]
        return "slow" if len(last) == options["patience"] and all(last) else "alive"


def expected(story: Story) -> Iterator[tuple[int, Poll]]:
    """Yield for each poll its place among the events, and its right result."""
    ranks, now_s = [_Rank() for _ in range(story.num_ranks)], 0.0
    options = {**DEFAULTS, **story.options}
    for place, (kind, *values) in enumerate(story.events, start=1):
        if kind == "wait":
            now_s += values[0]
        elif kind == "beat":
            ranks[values[0]].unseen = values[1], values[2]
        else:
            _see(ranks, now_s, options["slow_factor"])
            yield (
                place,
                [
                    (number, rank.step, now_s - rank.seen_s, rank.status(ranks, now_s, options))
                    for number, rank in enumerate(ranks)
                ],
            )


def _see(ranks: Sequence[_Rank], now_s: float, factor: float) -> None:
    new = [rank for rank in ranks if rank.unseen]
    for rank in new:
        assert rank.unseen is not None
        rank.seen_s, (rank.step, rank.busy_s), rank.unseen = now_s, rank.unseen, None
    median_s = median_low([rank.busy_s for rank in ranks if rank.busy_s is not None] or [0.0])
    for rank in new:
        assert rank.busy_s is not None
        rank.was_slow.append(rank.busy_s > factor * median_s)


def difference(story: Story, polls: Sequence[Poll]) -> tuple[int, str] | None:
    """Return the first difference from what should be said: number of events up to it, and text."""
    for (place, right), poll in zip(expected(story), polls, strict=True):
        for rank, (wanted, actual) in enumerate(zip(right, poll, strict=True)):
            if tuple(actual) != wanted:
                _, step, silent_s, status = wanted
                return place, (
                    f"its last poll should say of rank {rank}: step {step}, silent_s {silent_s}, "
                    f"{status!r}; it says: step {actual[1]}, silent_s {actual[2]}, {actual[3]!r}. "
                    f"{CAUSES[status] if silent_s == actual[2] else SILENCE}"
                )
    return None


def in_words(story: Story, num_events: int, most: int = 14) -> str:
    """Write the last events before something."""
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
        length, text, story = min(wrong, key=lambda failure: failure[0])  # the shortest says most
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
            check(
                len(names) <= most,
                f"a {kind} of 3 ranks called {len(names)} methods of the store, {names}; "
                f"{most} should be enough. {cause}",
            )
