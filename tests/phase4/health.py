"""A model of task 4.5: what a monitor should say in a story of ranks that report or fall silent."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from phase4.heartbeats import Event, Poll

DEFAULTS = {"slow_factor": 2.0, "patience": 3}
OPTIONS: Sequence[Mapping[str, float]] = ({}, {"patience": 2}, {"slow_factor": 4.0, "patience": 1})
CAUSES = {  # likely causes of a wrong status, by the right one
    "silent": "No rank has a lower step, so it is gone, or all pause. A rank that has never "
    "reported has the step -1, and timeout_s from the start of the monitor.",
    "waiting": "It has come to the collective of a later step, and waits there for the rank that "
    "is gone.",
    "slow": "A poll first reads all reports, and then judges each new one against all newest.",
    "alive": "It takes patience slow reports in a row, and a poll without a new report counts "
    "nothing. A rank that reports again is alive again.",
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
    """Draw a story in which one rank is slow in most steps, and some ranks end half-way.

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
        self.comparisons: list[str] = []  # comparison of each report with the median


def expected(story: Story) -> Iterator[tuple[int, Poll, list[str]]]:
    """Yield for each poll its place among the events, its right result, and the reasons by rank."""
    ranks, now_s = [_Rank() for _ in range(story.num_ranks)], 0.0
    options = {**DEFAULTS, **story.options}
    for place, (kind, *values) in enumerate(story.events, start=1):
        if kind == "wait":
            now_s += values[0]
        elif kind == "beat":
            ranks[values[0]].unseen = values[1], values[2]
        else:
            _see(ranks, now_s, options["slow_factor"])
            statuses = [_status(rank, ranks, now_s, options) for rank in ranks]
            poll = [
                (number, rank.step, now_s - rank.seen_s, status)
                for number, (rank, (status, _)) in enumerate(zip(ranks, statuses, strict=True))
            ]
            yield place, poll, [reason for _, reason in statuses]


def _see(ranks: Sequence[_Rank], now_s: float, factor: float) -> None:
    new = [rank for rank in ranks if rank.unseen]
    for rank in new:
        assert rank.unseen is not None
        rank.seen_s, (rank.step, rank.busy_s), rank.unseen = now_s, rank.unseen, None
    newest = sorted(rank.busy_s for rank in ranks if rank.busy_s is not None)
    for rank in new:
        assert rank.busy_s is not None
        median_s = newest[(len(newest) - 1) // 2]
        sign = ">" if rank.busy_s > factor * median_s else "≤"
        rank.comparisons.append(f"{rank.busy_s} {sign} {factor:g} · {median_s}")


def _status(
    rank: _Rank, ranks: Sequence[_Rank], now_s: float, options: Mapping[str, float]
) -> tuple[str, str]:
    """Return the right status of a rank, and the reason."""
    silent_s, timeout = now_s - rank.seen_s, f"timeout_s = {options['timeout_s']:g}"
    if silent_s > options["timeout_s"]:
        lower = [number for number, other in enumerate(ranks) if other.step < rank.step]
        reason = f"the step of rank {lower[0]} is lower" if lower else "the step of none is lower"
        status = "waiting" if lower else "silent"
        return status, f"{silent_s} s of silence are above {timeout}, and {reason}"
    last = rank.comparisons[-int(options["patience"]) :]
    is_slow = len(last) == options["patience"] and all(">" in text for text in last)
    reason = f"{silent_s} s of silence are not above {timeout}"
    if last:
        reason += f"; its last reports, against the medians of all newest ones: {', '.join(last)}"
    return "slow" if is_slow else "alive", reason


def difference(story: Story, polls: Sequence[Poll]) -> tuple[int, str] | None:
    """Return the first difference from what should be said: number of events up to it, and text."""
    for (place, right, reasons), poll in zip(expected(story), polls, strict=True):
        for rank, (wanted, found) in enumerate(zip(right, poll, strict=True)):
            if tuple(found) != wanted:
                _, step, silent_s, status = wanted
                return place, (
                    f"its last poll should say of rank {rank}: step {step}, silent_s {silent_s}, "
                    f"{status!r}; it says: step {found[1]}, silent_s {found[2]}, {found[3]!r}. "
                    f"Rank {rank} is {status} because {reasons[rank]}. "
                    f"{CAUSES[status] if silent_s == found[2] else SILENCE}"
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
