"""The report of a deadlock: its kind, the ranks that wait for each other, their lines, and advice.

deadlock (send/recv cycle): rank 0 waits for rank 1 to receive and rank 1 waits for rank 0 to …
  rank 0  send to rank 1, (4,) float32  ring.py:41 in exchange
  rank 1  send to rank 0, (4,) float32  ring.py:41 in exchange
Both wait in a send, which is done only when it is received. Let one of the two …
"""

from collections.abc import Sequence

from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Message
from distlab.sim.postmortem import near_misses, rows
from distlab.sim.postmortem.causes import Cause, find_causes
from distlab.sim.postmortem.standstill import Standstill
from distlab.sim.reporting.errors import BlockedCall, Deadlock
from distlab.sim.reporting.report import table
from distlab.util.text import lowered

MAX_CAUSES = 3


def explain(still: Standstill) -> Deadlock:
    """Return the error for a world in which no rank can continue."""
    causes = find_causes(still)
    kind = causes[0].kind
    ranks = {rank for cause in causes if cause.kind == kind for rank in cause.ranks}
    calls = [
        (rows.row_of(wait, still.waits_at.get(rank), still.group_names.name(wait)), wait)
        for rank, wait in still.blocked.items()
    ]
    advice = "\n".join(_advice(causes[0], still))
    if shift := _shift(causes[0], still):
        advice = f"{shift}\nIf not: {lowered(advice)}"
    idle = [message for message in still.unmatched if message not in still.beside]
    lines = [
        *_headlines(causes),
        *table(rows.fitting(calls, rows.MAX_ROWS, ranks) + rows.ends(still)),
        *rows.in_other_threads(still.beside),
        *rows.also_posted(idle, still.blocked, "never matched"),
        *rows.also_posted(still.queued, still.blocked, "not started"),
        advice,
    ]
    return Deadlock("\n".join(lines), sorted(ranks), kind, _blocked_calls(calls), advice)


def _headlines(causes: Sequence[Cause]) -> list[str]:
    first, *further = [f"({cause.kind}): {cause.words}" for cause in causes]
    lines = [f"deadlock {first}", *(f"and also {text}" for text in further[: MAX_CAUSES - 1])]
    if len(causes) > MAX_CAUSES:
        lines.append(f"… and {len(causes) - MAX_CAUSES} more causes")
    return lines


def _shift(cause: Cause, still: Standstill) -> str:
    """Return a note on the first call where a group's ranks may have got out of step, or ""."""
    last = {rank: call for rank, (_, call) in still.history.calls.items() if rank in still.ended}
    calls = [call for call in {**last, **still.blocked}.values() if isinstance(call, Attendance)]
    for key in dict.fromkeys(call.meeting.key for call in calls if call.rank in cause.involved):
        now = ((call.rank, call.lines) for call in calls if call.meeting.key == key)
        if shift := still.history.splits.shift(key, now):
            return shift
    return ""


def _advice(cause: Cause, still: Standstill) -> list[str]:
    """Return the cause's advice, or more specific hints on near misses, or both."""
    if hint := near_misses.kept_apart(still, cause.involved):
        return [hint]
    waits = (still.blocked[rank] for rank in cause.involved)
    waiting = [wait for wait in waits if isinstance(wait, Message)]
    if hint := near_misses.on_a_closed_connection(waiting):
        return [cause.advice, hint]
    pairs = list(near_misses.near_pairs(still.unmatched, waiting))
    if hint := near_misses.between_the_same_ranks(pairs) or near_misses.counted_inside_the_group(
        pairs
    ):
        return [hint]
    if hint := near_misses.taken_by_another(waiting):
        return [hint, f"If not: {lowered(cause.advice)}"]
    is_cycle = cause.kind == "send/recv cycle"
    posted = _ranks_with_the_other_side(waiting, still.unmatched) if is_cycle else set()
    trusts_peers = posted != {*cause.involved}  # else, all could go on if the peers were right
    doubtful = near_misses.doubtful(
        pairs, still, cause.involved, is_cycle=is_cycle, trusts_peers=trusts_peers
    )
    hint = near_misses.with_another_rank(doubtful)
    if hint and posted:
        return [hint]  # the cycle's advice is to do what they have already done
    return [cause.advice, f"Or else: {hint}"] if hint else [cause.advice]


def _ranks_with_the_other_side(
    waiting: Sequence[Message], unmatched: Sequence[Message]
) -> set[int]:
    """Return the ranks of a cycle that have also posted what others may wait for."""
    ranks, names = {wait.rank for wait in waiting}, {wait.name for wait in waiting}
    return {m.rank for m in unmatched if m.rank in ranks and m.name not in names}


def _blocked_calls(calls: rows.Calls) -> list[BlockedCall]:
    """Turn the table's calls into ``BlockedCall`` objects, which share equal tuples of peers."""
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    blocked = []
    for row, wait in calls:
        peers = tuple(wait.waits_for())
        peers = shared.setdefault(peers, peers)
        blocked.append(BlockedCall(wait.rank, wait.name, peers, row.where, row.text))
    return blocked
