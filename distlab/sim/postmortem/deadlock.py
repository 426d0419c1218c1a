"""The report of a deadlock: its kind, who waits for whom, on which line, and what to change.

deadlock (send/recv cycle): rank 0 waits for rank 1 to receive and rank 1 waits for rank 0 to …
  rank 0  send to rank 1, (4,) float32  ring.py:41 in exchange
  rank 1  send to rank 0, (4,) float32  ring.py:41 in exchange
Both wait in a send, which is done only when it is received. Let one of the two …
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

from distlab.sim.messages.made_group import MadeGroup
from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.postmortem import near_misses, order
from distlab.sim.postmortem.causes import Cause, find_causes
from distlab.sim.postmortem.standstill import Standstill
from distlab.sim.reporting.errors import BlockedCall, Deadlock
from distlab.sim.reporting.report import Row, place, shorten, table
from distlab.sim.reporting.sites import Site

MAX_ROWS = 12
MAX_CAUSES = 3
MAX_IDLE = 6


class History(NamedTuple):
    """What ranks did before they deadlocked, and by which rules.

    Attributes:
        calls: by rank, how many calls of torch.distributed it made, and the last one.
        arrived: by source and destination, how many messages have arrived.
        groups: all that were made, by their keys.
        is_in_order: messages of a pair ran one after the other (``Options.p2p_order``).
    """

    calls: Mapping[int, tuple[int, Pending]] = MappingProxyType({})
    arrived: Mapping[tuple[int, int], int] = MappingProxyType({})
    groups: Mapping[object, MadeGroup] = MappingProxyType({})
    is_in_order: bool = False


def explain(
    blocked: Mapping[int, Pending],
    ended: Iterable[int] = (),
    killed: Iterable[int] = (),
    unmatched: Iterable[Message] = (),
    queued: Iterable[Message] = (),
    waits_at: Mapping[int, Site] | None = None,
    history: History | None = None,
    beside: Iterable[Pending] = (),
) -> Deadlock:
    """Make the error for a world in which no rank can go on.

    Args:
        blocked: by rank, the operation in which it waits.
        ended: ranks that have returned or were killed.
        killed: those of them that a fault has killed.
        unmatched: all sends and recvs that were posted and have not met.
        queued: those that were posted but wait for others of their rank before they start.
        waits_at: by rank, the line on which it waits; the line on which it posted is known.
        history: what the ranks did before.
        beside: the operations in which further threads of the ranks wait.
    """
    history, beside = history or History(), list(beside)
    still = Standstill(
        blocked,
        ended,
        killed,
        history.arrived,
        calls=history.calls,
        groups=history.groups,
        is_in_order=history.is_in_order,
    )
    unmatched = sorted(unmatched, key=lambda message: message.rank)
    queued = sorted(queued, key=lambda message: message.rank)
    causes = find_causes(still)
    kind = causes[0].kind
    ranks = {rank for cause in causes if cause.kind == kind for rank in cause.ranks}
    calls = [(_row(wait, (waits_at or {}).get(rank)), wait) for rank, wait in still.blocked.items()]
    advice = "\n".join(_advice(causes[0], still, unmatched, queued, beside))
    lines = [
        *_headlines(causes),
        *table(_fitting(calls, MAX_ROWS, ranks) + _ends(still, history.calls)),
        *_in_other_threads(beside),
        *_also_posted([m for m in unmatched if m not in beside], still.blocked, "never matched"),
        *_also_posted(queued, still.blocked, "not started"),
        advice,
    ]
    return Deadlock("\n".join(lines), sorted(ranks), kind, _blocked_calls(calls), advice)


def _headlines(causes: Sequence[Cause]) -> list[str]:
    first, *others = [f"({cause.kind}): {cause.words}" for cause in causes]
    lines = [f"deadlock {first}", *(f"and also {other}" for other in others[: MAX_CAUSES - 1])]
    if len(causes) > MAX_CAUSES:
        lines.append(f"… and {len(causes) - MAX_CAUSES} more causes")
    return lines


def _advice(
    cause: Cause,
    still: Standstill,
    unmatched: Sequence[Message],
    queued: Sequence[Message],
    beside: Sequence[Pending],
) -> list[str]:
    """Put calls that nearly matched first, often alone: they say more than the kind does."""
    if hint := order.kept_apart(queued, unmatched, still.blocked, cause.involved):
        return [hint]
    waits = (still.blocked[rank] for rank in cause.involved)
    waiting = [wait for wait in waits if isinstance(wait, Message)]
    if hint := near_misses.on_a_closed_connection(waiting):
        return [cause.advice, hint]
    pairs = list(near_misses.near_pairs(unmatched, waiting))
    if hint := near_misses.between_the_same_ranks(pairs) or near_misses.counted_inside_the_group(
        pairs
    ):
        return [hint]
    if hint := near_misses.taken_by_another(waiting):
        return [hint, f"If not: {cause.advice[:1].lower()}{cause.advice[1:]}"]
    is_cycle = cause.kind == "send/recv cycle"
    doubtful = near_misses.doubtful(pairs, still, cause.involved, is_cycle=is_cycle)
    busy = {wait.rank for wait in beside}  # in other threads, which may be those to receive
    hint = near_misses.with_another_rank(doubtful) if busy.isdisjoint(cause.involved) else ""
    if hint and is_cycle and _have_posted_the_other_side(waiting, unmatched):
        return [hint]  # the cycle's advice, to post the other side, does not fit
    return [cause.advice, f"Or else: {hint}"] if hint else [cause.advice]


def _have_posted_the_other_side(waiting: Sequence[Message], unmatched: Sequence[Message]) -> bool:
    ranks, names = {wait.rank for wait in waiting}, {wait.name for wait in waiting}
    return any(message.rank in ranks and message.name not in names for message in unmatched)


Calls = Sequence[tuple[Row, Pending]]


def _blocked_calls(calls: Calls) -> list[BlockedCall]:
    """Say for programs what the table says for people; ranks with equal waits share one tuple."""
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    blocked = []
    for row, wait in calls:
        peers = tuple(wait.waits_for())
        peers = shared.setdefault(peers, peers)
        blocked.append(BlockedCall(wait.rank, wait.name, peers, row.where, row.text))
    return blocked


# Rows


def _row(wait: Pending, waits_at: Site | None = None) -> Row:
    row = wait.row()
    if waits_at is None or waits_at == wait.site:
        return row
    is_near = waits_at[::2] == wait.site[::2]  # same file and function
    there = f"line {waits_at[1]}" if is_near else place(waits_at)
    return row._replace(where=f"{row.where}, waits at {there}")


def _fitting(calls: Calls, limit: int, to_blame: Set[int] = frozenset()) -> list[Row]:
    """Merge rows until they fit; if they never do, keep those of the ranks to blame."""
    rows = _merged(calls, [row.text for row, _ in calls])
    if len(rows) > limit:
        rows = _merged(calls, [_relative(*call) for call in calls])
    if len(rows) > limit:
        rows.sort(key=lambda row: to_blame.isdisjoint(row.ranks))
    return shorten(rows, limit)


def _merged(calls: Calls, texts: Iterable[str]) -> list[Row]:
    """Make one row of those with the same text, line and collective."""
    groups: dict[tuple[str, str, object], list[Row]] = {}
    for (row, wait), text in zip(calls, texts, strict=True):
        meeting = wait.meeting if isinstance(wait, Attendance) else None
        groups.setdefault((text, row.where, meeting), []).append(row)
    return [_one(rows, text) for (text, _, _), rows in groups.items()]


def _one(rows: Sequence[Row], text: str) -> Row:
    """Merge rows into one with this text; a rank of its own keeps its text."""
    ranks = sorted({row.ranks[0] for row in rows})
    text = text if len(ranks) > 1 else rows[0].text
    if len(rows) > len(ranks):
        text += f" ({len(rows)} times)"
    return Row(tuple(ranks), text, rows[0].where)


def _relative(row: Row, wait: Pending) -> str:
    """Name the peer by its distance: ``send to rank + 1``, ``send to themselves``."""
    if not isinstance(wait, Message) or wait.peer == ANY_SOURCE:
        return row.text
    distance = wait.peer - wait.rank
    sign = "+" if distance > 0 else "-"
    there = f"rank {sign} {abs(distance)}" if distance else "themselves"
    return row.text.replace(f"rank {wait.peer}", there, 1)


def _ends(still: Standstill, calls: Mapping[int, tuple[int, Pending]]) -> list[Row]:
    """Say how ranks have ended, and how far those that returned had come."""
    returned = still.ended - still.killed
    quiet = tuple(sorted(returned.difference(calls)))
    others = [(_last(*calls[rank]), calls[rank][1]) for rank in sorted(returned & set(calls))]
    killed = tuple(sorted(still.killed))
    return [
        *(
            [Row(quiet, "returned without communicating" if calls else "returned", "")]
            if quiet
            else []
        ),
        *_fitting(others, MAX_IDLE),
        *([Row(killed, "killed by a fault", "")] if killed else []),
    ]


def _last(num_calls: int, last: Pending) -> Row:
    count = "1 call" if num_calls == 1 else f"{num_calls} calls, the last"
    return last.row()._replace(text=f"returned after {count}: {last.text()}")


def _in_other_threads(operations: Iterable[Pending]) -> list[str]:
    """List where further threads of the ranks wait."""
    rows = _fitting([(_row(operation), operation) for operation in operations], MAX_IDLE)
    return ["other threads wait too:", *table(rows)] if rows else []


def _also_posted(
    messages: Iterable[Message], blocked: Mapping[int, Pending], fate: str
) -> list[str]:
    """List the messages in which no rank waits: one of them may be what a rank waits for."""
    idle = [(_row(m), m) for m in messages if m is not blocked.get(m.rank)]
    rows = _fitting(idle, MAX_IDLE)
    return [f"also posted, and {fate}:", *table(rows)] if rows else []
