"""Stories of ranks that report, fall silent and are slow, and what a monitor should tell of them.

All times are multiples of 2.5 s, so that a silence often is as long as the timeout, to the bit; and
all busy_s are powers of two, so that one often is as long as twice another.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from phase4.heartbeats import Event

TIMEOUT_S, SLOW_FACTOR, PATIENCE = 10.0, 2.0, 2
OPTIONS = {"timeout_s": TIMEOUT_S, "slow_factor": SLOW_FACTOR, "patience": PATIENCE}
Told = list[tuple[int, int, float, str]]  # rank by rank: rank, step, silent_s, status


class Story(NamedTuple):
    """What happens to some ranks and to their monitor."""

    num_ranks: int
    events: list[Event]


class Difference(NamedTuple):
    """The first thing in a story that a monitor tells in another way than it should."""

    num_events: int  # up to there
    text: str


def draw(random: Random, num_events: int) -> Story:
    """Draw a story: one rank is slow in most steps, and some end in the middle of it."""
    num_ranks = random.randint(2, 5)
    steps, slow = [0] * num_ranks, random.randrange(num_ranks)
    ends = [random.choice([num_events, num_events // 2]) for _ in range(num_ranks)]
    events: list[Event] = [("wait", 2.5 * random.randint(0, 5))]
    while len(events) < num_events:
        events += [("poll",), ("wait", random.choice([0.0, 2.5, 2.5, 5.0]))]
        for rank in random.sample(range(num_ranks), num_ranks):
            if random.random() < 0.5 and len(events) < ends[rank]:
                often = 1.0 if rank == slow else 0.25
                busy_s = random.choice([often, often, often, often, 0.5, 1.0])
                events.append(("beat", rank, steps[rank], busy_s))
                steps[rank] += random.choice([0, 1, 1])
    return Story(num_ranks, [*events, ("poll",)])


class _Rank:
    """What there is to know of a rank."""

    def __init__(self) -> None:
        self.seen_s, self.step = 0.0, -1
        self.unseen: tuple[int, float] | None = None  # step and busy_s of a newer report
        self.busy_s: float | None = None
        self.verdicts: list[str] = []  # one for each report that was seen


def expected(story: Story) -> Iterator[tuple[int, Told, list[str]]]:
    """Tell of each poll where it is among the events, what it should tell, and why."""
    ranks, now_s = [_Rank() for _ in range(story.num_ranks)], 0.0
    for place, (what, *values) in enumerate(story.events, start=1):
        if what == "wait":
            now_s += values[0]
        elif what == "beat":
            ranks[values[0]].unseen = values[1], values[2]
        else:
            _see(ranks, now_s)
            known = [_known_of(rank, ranks, now_s) for rank in ranks]
            told = [
                (number, rank.step, now_s - rank.seen_s, status)
                for number, (rank, (status, _)) in enumerate(zip(ranks, known, strict=True))
            ]
            yield place, told, [why for _, why in known]


def _see(ranks: Sequence[_Rank], now_s: float) -> None:
    new = [rank for rank in ranks if rank.unseen]
    for rank in new:
        assert rank.unseen is not None
        rank.seen_s, (rank.step, rank.busy_s), rank.unseen = now_s, rank.unseen, None
    newest = sorted(rank.busy_s for rank in ranks if rank.busy_s is not None)
    for rank in new:
        assert rank.busy_s is not None
        median_s = newest[(len(newest) - 1) // 2]
        sign = ">" if rank.busy_s > SLOW_FACTOR * median_s else "≤"
        rank.verdicts.append(f"{rank.busy_s} {sign} {SLOW_FACTOR:g} · {median_s}")


def _known_of(rank: _Rank, ranks: Sequence[_Rank], now_s: float) -> tuple[str, str]:
    """Return the status of a rank, and why it has that one."""
    silent_s = now_s - rank.seen_s
    if silent_s > TIMEOUT_S:
        lower = [number for number, other in enumerate(ranks) if other.step < rank.step]
        why = f"the step of rank {lower[0]} is lower" if lower else "the step of none is lower"
        status = "waiting" if lower else "silent"
        return status, f"{silent_s} s of silence are above timeout_s = {TIMEOUT_S:g}, and {why}"
    last = rank.verdicts[-PATIENCE:]
    is_slow = len(last) == PATIENCE and all(">" in verdict for verdict in last)
    why = f"{silent_s} s of silence are not above timeout_s = {TIMEOUT_S:g}"
    if last:
        why += f"; its last reports, against the medians of all newest ones: {', '.join(last)}"
    return "slow" if is_slow else "alive", why


def compare(story: Story, polls: Sequence[Told]) -> Difference | None:
    """Compare what the polls of a story tell with what they should tell."""
    for (place, right, why), told in zip(expected(story), polls, strict=True):
        for rank, (wanted, found) in enumerate(zip(right, told, strict=True)):
            if tuple(found) != wanted:
                _, step, silent_s, status = wanted
                text = (
                    f"its last poll should tell of rank {rank}: step {step}, silent_s {silent_s}, "
                    f"{status!r}; it tells: step {found[1]}, silent_s {found[2]}, {found[3]!r}. "
                    f"It is {status} because {why[rank]}."
                )
                return Difference(place, text)
    return None


def told_of(story: Story, num_events: int, most: int = 14) -> str:
    """Write the last events before something."""
    events = [event for event in story.events[:num_events] if event != ("wait", 0.0)]
    left = "… → " if len(events) > most else ""
    return left + " → ".join(_words(event) for event in events[-most:])


def _words(event: Event) -> str:
    what, *values = event
    if what == "beat":
        rank, step, busy_s = values
        return f"rank {rank} reports step {step}, busy_s {busy_s}"
    return f"{values[0]:g} s" if what == "wait" else "poll"
