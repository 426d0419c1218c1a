"""Collectives on the wrong group: what a forgotten ``group=`` looks like, where it can be seen."""

from collections.abc import Iterable, Sequence

from distlab.sim.messages.meetings import Attendance
from distlab.sim.postmortem.standstill import Standstill
from distlab.words import rank_names


def wrong_group(still: Standstill, ranks: Sequence[int], groups: Iterable[Sequence[int]]) -> str:
    """Ask whether ranks that wait in a collective gave the wrong group; "" if nothing points to it.

    Args:
        still: who waits for whom.
        ranks: those that wait for the same.
        groups: the members of all that the program has made.
    """
    wait = still.blocked[ranks[0]]
    if not isinstance(wait, Attendance):
        return ""
    return _same_call_elsewhere(still, ranks, wait) or _fitting_group(still, ranks, wait, groups)


def _same_call_elsewhere(still: Standstill, ranks: Sequence[int], wait: Attendance) -> str:
    """Look for a rank that waits for one of these in the same call, on another group."""
    for rank, other in still.blocked.items():
        if not isinstance(other, Attendance) or (other.name, rank in wait.group) != (
            wait.name,
            True,
        ):
            continue
        missed = set(ranks).intersection(still.waits_for[rank])
        if missed and other.group != wait.group:
            wide, narrow = sorted((wait, other), key=lambda call: -len(call.group))
            return (
                f"Rank {wide.rank} calls {wide.name} on {rank_names(wide.group)}, and rank "
                f"{narrow.rank} on {rank_names(narrow.group)}: is group= {_fault(wide)} on rank "
                f"{wide.rank}?"
            )
    return ""


def _fitting_group(
    still: Standstill,
    ranks: Sequence[int],
    wait: Attendance,
    groups: Iterable[Sequence[int]],
) -> str:
    """Look for a group that has those who are there and none of those who are not."""
    absent = set(still.waits_for[ranks[0]])
    present = set(wait.group) - absent
    fitting = [group for group in groups if present.issubset(group) and absent.isdisjoint(group)]
    if not fitting or len(present) < 2:
        return ""
    group = min(fitting, key=lambda members: (len(members), tuple(members)))
    return (
        f"There is a group of {rank_names(group)}, which would not wait for "
        f"{rank_names(absent)}: is group= {_fault(wait)} in this {wait.name}?"
    )


def _fault(wait: Attendance) -> str:
    return "missing" if len(wait.group) == wait.clock.num_ranks else "wrong"
