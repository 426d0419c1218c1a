"""Hints that a collective is on the wrong group, for example because ``group=`` is missing."""

from collections.abc import Iterator, Sequence

from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.pending import Pending
from distlab.sim.postmortem.standstill import Standstill
from distlab.util.text import rank_names, verb


def wrong_group(still: Standstill, involved: Sequence[int], ranks: Sequence[int]) -> str:
    """Return a hint that a collective may be on the wrong group; "" if nothing suggests that.

    Args:
        involved: All ranks that the cause blocks.
        ranks: The ranks among them whose call is in question; their waits are equal.
    """
    if hint := _other_group_on_the_line(still, involved):
        return hint
    wait = still.blocked[ranks[0]]
    if not isinstance(wait, Attendance):
        return ""
    return _same_call_elsewhere(still, ranks, wait) or _fitting_group(still, ranks, wait)


def _other_group_on_the_line(still: Standstill, ranks: Sequence[int]) -> str:
    """Return a hint if missing ranks made the same call on the same line, but on another group.

    The hint begins: At train.py:7 in step, rank 3 calls all_reduce on ranks 0-3, and ranks 0-2 …
    """
    for first in dict.fromkeys(still.mates[rank][0] for rank in ranks):
        wait, mates = still.blocked[first], still.mates[first]
        if not isinstance(wait, Attendance) or not (calls := list(_elsewhere(still, wait))):
            continue
        who = [call.rank for call in calls if call.group == calls[0].group]
        return (
            f"At {wait.where()}, {rank_names(mates)} {verb(mates, 'call')} {wait.name} on "
            f"{_described(still, wait)}, and {rank_names(who)} {verb(who, 'call')} it on "
            f"{_described(still, calls[0])}: {_question((wait, mates), (calls[0], who))}"
        )
    return ""


def _elsewhere(still: Standstill, wait: Attendance) -> Iterator[Attendance]:
    """Yield missing ranks' calls that have the name and line of ``wait``, but another group."""
    for peer in still.waits_for[wait.rank]:
        call = still.blocked.get(peer) or still.history.calls.get(peer, (0, None))[1]
        if (
            isinstance(call, Attendance)
            and (call.site, call.name) == (wait.site, wait.name)
            and call.group != wait.group
        ):
            yield call


def _described(still: Standstill, wait: Pending) -> str:
    name = still.group_names.name(wait)
    return f"{rank_names(wait.group)} ({name})" if name else rank_names(wait.group)


def _same_call_elsewhere(still: Standstill, ranks: Sequence[int], wait: Attendance) -> str:
    """Return a hint if a rank waits for one of ``ranks`` in the same call on another group."""
    for rank, other in still.blocked.items():
        if not isinstance(other, Attendance) or other.name != wait.name:
            continue
        is_elsewhere = rank in wait.group and other.group != wait.group
        if is_elsewhere and not set(ranks).isdisjoint(still.waits_for[rank]):
            return (
                f"Rank {wait.rank} calls {wait.name} on {_described(still, wait)}, and rank {rank} "
                f"on {_described(still, other)}: "
                f"{_question((wait, [wait.rank]), (other, [rank]))}"
            )
    return ""


def _question(*calls: tuple[Attendance, Sequence[int]]) -> str:
    """Ask whether ``group=`` is wrong in one of two calls, usually the one on the larger group."""
    (first, _), (second, _) = calls
    if len(first.group) == len(second.group):
        return "is group= wrong on one of them?"
    wide, ranks = max(calls, key=lambda call: len(call[0].group))
    fault = _fault(wide)
    if fault == "missing" and first.site == second.site:
        fault = "missing, or None,"  # the line makes both calls, so it may pass group=None
    return f"is group= {fault} on {rank_names(ranks)}?"


def _fitting_group(still: Standstill, ranks: Sequence[int], wait: Attendance) -> str:
    """Return a hint if some group contains all present ranks and no absent one."""
    absent = set(still.waits_for[ranks[0]])
    present = set(wait.group) - absent
    groups = {made.members for made in still.history.groups.values()}
    fitting = [group for group in groups if present.issubset(group) and absent.isdisjoint(group)]
    if not fitting or len(present) < 2:
        return ""
    group = min(fitting, key=lambda members: (len(members), members))
    return (
        f"There is a group of {rank_names(group)}, which would not wait for "
        f"{rank_names(absent)}: is group= {_fault(wait)} in this {wait.name}?"
    )


def _fault(wait: Attendance) -> str:
    """Say whether ``group=`` is missing or wrong in a call whose group has too many ranks."""
    return "missing" if len(wait.group) == wait.clock.num_ranks else "wrong"
