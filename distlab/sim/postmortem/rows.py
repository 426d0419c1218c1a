"""The rows of a report: ranks that wait, ranks that have ended, and other posted operations."""

from collections.abc import Iterable, Mapping, Sequence, Set

from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.messages.work import Handles
from distlab.sim.postmortem.handlers import handler_around
from distlab.sim.postmortem.standstill import ABSENT, Standstill
from distlab.sim.postmortem.thread_waits import of_several
from distlab.sim.reporting.errors import Mismatch
from distlab.sim.reporting.report import Row, mismatch, place, shorten, table
from distlab.sim.reporting.sites import Death, Exit, Site
from distlab.util.text import counted, seconds_text

MAX_IDLE = 6
Calls = Sequence[tuple[Row, Pending]]


def row_of(wait: Pending, waits_at: Site | None = None, group: str = "") -> Row:
    """Return the row for a wait.

    Args:
        waits_at: Line on which the rank waits, or None if it is unknown.
        group: Name of the group, or "" if its ranks alone identify it.
    """
    row = wait.row()
    if group:
        row = row._replace(text=f"{row.text}, on {group}")
    words = _waiting(wait, waits_at)
    return row._replace(where=f"{row.where}, {words}") if words else row


def _waiting(wait: Pending, waits_at: Site | None) -> str:
    """Return ``waits at line 9`` or, with GPUs, ``waits in .item() at line 9``; "" if obvious."""
    doing = wait.waiters[0].doing if wait.waiters else ""
    if waits_at is None or waits_at == wait.site or (doing and not waits_at[0]):
        return doing
    return f"{doing or 'waits'} {at(waits_at, wait.site)}"


def fitting(calls: Calls, limit: int, to_blame: Set[int] = frozenset()) -> list[Row]:
    """Merge rows to fit the limit; if too many are left, show those of ranks to blame first."""
    rows = _merged(calls, [row.text for row, _ in calls])
    if len(rows) > limit:
        rows = _merged(calls, [_relative(*call) for call in calls], has_threads=False)
    if len(rows) > limit:
        rows.sort(key=lambda row: to_blame.isdisjoint(row.ranks))
    return shorten(rows, limit)


def _merged(calls: Calls, texts: Iterable[str], *, has_threads: bool = True) -> list[Row]:
    """Merge rows with the same text, line, collective and thread name."""
    groups: dict[tuple[str, str, object], list[Row]] = {}
    for (row, wait), text in zip(calls, texts, strict=True):
        meeting = wait.meeting if isinstance(wait, Attendance) else None
        row = row._replace(where=row.where + _thread(wait)) if has_threads else row
        groups.setdefault((text, row.where, meeting), []).append(row)
    return [_merged_row(rows, text) for (text, _, _), rows in groups.items()]


def _thread(wait: Pending) -> str:
    """Return ``, thread 'saver'`` if a thread other than the rank's first one waits; else ""."""
    name = "" if wait.is_done or not wait.waiters else wait.waiters[0].name
    return f", thread {name!r}" if name else ""


def _merged_row(rows: Sequence[Row], text: str) -> Row:
    """Merge rows into one with the given text; rows of a single rank keep their own text."""
    ranks = sorted({row.ranks[0] for row in rows})
    text = of_several(text) if len(ranks) > 1 else rows[0].text
    if len(rows) > len(ranks):
        text += f" ({len(rows)} times)"
    return Row(tuple(ranks), text, rows[0].where)


def _relative(row: Row, wait: Pending) -> str:
    """Return a row's text with the peer relative to the rank, as in ``send to rank + 1``."""
    if not isinstance(wait, Message) or wait.peer == ANY_SOURCE:
        return row.text
    distance = wait.peer - wait.rank
    sign = "+" if distance > 0 else "-"
    there = f"rank {sign} {abs(distance)}" if distance else "themselves"
    return row.text.replace(f"rank {wait.peer}", there, 1)


def ends(still: Standstill) -> list[Row]:
    """Return rows on how and where ranks have ended, with the last calls of those that returned."""
    calls, exits = still.history.calls, still.history.exits
    absent = sorted(still.ended.intersection(still.history.absent) - still.killed)
    returned = still.ended.difference(still.killed, absent)
    caught = {site: _caught(site) for site in {end.at for end in exits.values()}}
    quiet = [
        _quiet(rank, exits.get(rank), calls, caught) for rank in sorted(returned.difference(calls))
    ]
    communicated = [
        (_last(_count(number, still), call, exits.get(rank), caught), call)
        for rank in sorted(returned & set(calls))
        for number, call in [calls[rank]]
    ]
    killed = [_killed(rank, still.history.deaths.get(rank)) for rank in sorted(still.killed)]
    return [
        *alike(quiet),
        *fitting(communicated, MAX_IDLE),
        *alike(killed),
        *alike(Row((rank,), ABSENT, "") for rank in absent),
    ]


def _killed(rank: int, death: Death | None) -> Row:
    if death is None:
        return Row((rank,), "killed by a fault", "")
    steps = f", {counted(death.num_steps, 'optimizer step')} begun" if death.num_steps else ""
    text = f"killed by a fault at {seconds_text(death.time_s)}{steps}"
    return Row((rank,), text, place(death.at) if death.at else "before its first call")


def _quiet(
    rank: int, end: Exit | None, calls: Mapping[int, object], caught: Mapping[Site, str]
) -> Row:
    text = f"{_left(end)} without communicating" if calls else _left(end)
    return Row((rank,), text, f"{place(_last_site(end))}{caught[end.at]}" if end else "")


def _last(count: str, last: Pending, end: Exit | None, caught: Mapping[Site, str]) -> Row:
    row = last.row()
    where = row.where
    if end:
        where += f", {_left(end)} {at(_last_site(end), last.site)}{caught[end.at]}"
    return row._replace(text=f"{_left(end)} after {count}: {last.text()}", where=where)


def _count(num_calls: int, still: Standstill) -> str:
    count = counted(num_calls, "call") + " in this run" * still.history.is_session
    return count if num_calls == 1 else f"{count}, the last"


def _left(end: Exit | None) -> str:
    return "destroyed its process group" if end and end.left_group_at else "returned"


def _last_site(end: Exit) -> Site:
    return end.left_group_at or end.at


def _caught(site: Site) -> str:
    """Return ``, in the except of line 9`` if the line is inside that ``except``; else ""."""
    handler = handler_around(site)
    return f", in the except of line {handler.lineno}" if handler else ""


def at(site: Site, near: Site) -> str:
    """Return ``at line 9``, or the full place if ``near`` is in another function."""
    return f"at line {site[1]}" if site[::2] == near[::2] else f"at {place(site)}"


def alike(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in their rank."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.text, row.where), []).append(row)
    return [_merged_row(group, text) for (text, _), group in groups.items()]


def in_other_threads(operations: Iterable[Pending]) -> list[str]:
    """Return a table, with a heading, of the operations that block other threads of the ranks."""
    rows = fitting([(row_of(operation), operation) for operation in operations], MAX_IDLE)
    return ["other threads wait too:", *table(rows)] if rows else []


def also_posted(
    messages: Iterable[Message], blocked: Mapping[int, Pending], fate: str
) -> list[str]:
    """Return a table of messages that do not block their own rank; another rank may need them."""
    idle = [(row_of(m), m) for m in messages if m is not blocked.get(m.rank)]
    rows = fitting(idle, MAX_IDLE)
    return [f"also posted, and {fate}:", *table(rows)] if rows else []


MAX_ROWS = 12


def never_met(operations: Sequence[Pending]) -> list[str]:
    """Return a table of operations that never matched, but did not block any rank either."""
    return table(shorten([operation.row() for operation in operations], MAX_ROWS))


def never_met_error(operations: Sequence[Pending]) -> Mismatch:
    """Return the error for one or more operations that never matched."""
    num = len(operations)
    count = "an operation was" if num == 1 else f"{num} operations were"
    return mismatch(
        "never met",
        f"{count} posted, but never matched",
        shorten([operation.row() for operation in operations], MAX_ROWS),
        "Every send needs a recv, every collective all ranks, and every request a wait().",
    )


def unwaited(handles: Handles, ranks: Iterable[int]) -> list[str]:
    """Return a table of these ranks' handles that were never waited for."""
    return table(shorten(handles.rows(ranks), MAX_ROWS))
