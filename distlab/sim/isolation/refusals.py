"""Calls that ``torch.distributed`` refuses: the ranks that saw the error, and its wording.

A rank that catches such an error continues or returns, while the other ranks, which have not seen
the error, wait for it. So the last error of each rank is kept for the report.
"""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.c10d_logger as c10d_logger
import torch.distributed.distributed_c10d as c10d

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import Killed, Stopped
from distlab.sim.isolation.exits import Exits
from distlab.sim.isolation.rank_states import RankStates, Replace
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.reporting.report import WHO, error_line, merged_notes, place
from distlab.sim.reporting.sites import Places
from distlab.util.text import rank_names

_LISTS = {  # call -> its argument that lists one object per rank
    "all_gather_object": "object_list",
    "gather_object": "object_gather_list",
    "scatter_object_list": "scatter_object_input_list",
}


class Refusals:
    """By rank, the last error that a call of ``torch.distributed`` raised there."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[str, int]] = {}
        self._outside: dict[int, str] = {}

    def note(self, rank: int, call: str, error: BaseException | None, num_calls: int) -> None:
        """Keep an error, unless it only says that the world has ended.

        Args:
            rank: Rank on which the error was raised.
            call: Name of the call that raised it.
            error: Error, or None if there is none.
            num_calls: Number of successful calls on this rank so far.
        """
        if error is not None and not isinstance(error, SimulationError | Stopped | Killed):
            self._by_rank[rank] = f"{call} raised {error_line(error)}.", num_calls

    def note_outside(self, rank: int, call: str, where: str) -> None:
        """Record that a rank made a call on a group that it is not in."""
        self._outside.setdefault(rank, f"called {call} on a group that it is not in, {where}")

    def outside_note(self, rank: int) -> str:
        """Return a note on a call that torch left out with only a warning, or ""."""
        call = self._outside.get(rank)
        return f"Before, rank {rank} {call}: torch has left out that call." if call else ""

    def notes(self, num_calls: Mapping[int, int]) -> list[str]:
        """Report errors that ranks got instead of their last call, or of the one before it.

        Args:
            num_calls: Number of successful calls by rank.
        """
        recent = {
            rank: error
            for rank, count in num_calls.items()
            for error, before in [self._by_rank.get(rank, ("", count - 2))]
            if count - before < 2
        }
        return merged_notes(
            (rank, f"On {WHO}, {error} The exception was caught, so the other ranks do not know.")
            for rank, error in recent.items()
        )


def install(
    replace: Replace,
    clock: Clock,
    rank_states: RankStates,
    refusals: Refusals,
    exits: Exits,
    places: Places,
) -> None:
    """Make torch's errors say what a program can change, and note what torch refuses."""
    _note_refusals(replace, clock, rank_states, refusals)
    _speak_of_groups(replace, rank_states)
    _note_outsiders(replace, rank_states, refusals, places)
    _speak_of_the_end(replace, rank_states, exits)


def _note_refusals(
    replace: Replace, clock: Clock, rank_states: RankStates, refusals: Refusals
) -> None:
    describe_call = c10d_logger._get_msg_dict

    def note_and_describe(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        error = sys.exc_info()[1]
        if rank_states.is_in_rank():
            _speak_of_objects(name, error, args, kwargs)
            rank = clock.current.rank
            refusals.note(rank.number, name, error, rank.num_calls)
        with contextlib.suppress(Exception):  # torch's function fails outside of a group
            return describe_call(name, *args, **kwargs)
        return {}

    replace(c10d_logger, "_get_msg_dict", note_and_describe)


def _note_outsiders(
    replace: Replace, rank_states: RankStates, refusals: Refusals, places: Places
) -> None:
    """Note calls that torch leaves out with only a warning."""

    def warn_and_note(call: str) -> None:
        rank, where = rank_states.current, place(places.call_site()[0])
        refusals.note_outside(rank, call, where)
        warnings.warn(f"rank {rank} calls {call} on a group that it is not in", stacklevel=3)

    replace(c10d, "_warn_not_in_group", warn_and_note)


def _speak_of_objects(
    name: str, error: BaseException | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make errors of object collectives name the list of objects, not the tensors made of it."""
    if error is None or name not in _LISTS:
        return
    if "``gather_list``" in str(error):
        error.args = (str(error).replace("``gather_list``", f"``{_LISTS[name]}``"),)
    elif isinstance(error, IndexError) or str(error).startswith("scatter over"):
        given = inspect.signature(getattr(c10d, name)).bind(*args, **kwargs).arguments
        num_objects, size = len(given[_LISTS[name]]), dist.get_world_size(given.get("group"))
        if num_objects != size:
            error.args = (
                f"{name} over {size} ranks needs a list of {size} objects, got {num_objects}",
            )


def _speak_of_the_end(replace: Replace, rank_states: RankStates, exits: Exits) -> None:
    """Make errors after ``destroy_process_group`` say where the rank called it."""
    update, find = c10d._update_default_pg, c10d._get_default_group

    def update_default_group(group: Any) -> None:
        if group is None and rank_states.is_in_rank():  # destroy_process_group()
            exits.left(rank_states.current)
        update(group)

    def get_default_group() -> Any:
        known = exits.known.get(rank_states.current)
        if known is None or known.left_group_at is None or dist.is_initialized():
            return find()
        raise ValueError(
            f"rank {rank_states.current} has destroyed its process group at "
            f"{place(known.left_group_at)}: what communicates comes before that"
        )

    replace(c10d, "_update_default_pg", update_default_group)
    replace(c10d, "_get_default_group", get_default_group)


def _speak_of_groups(replace: Replace, rank_states: RankStates) -> None:
    number_in_group, tables = c10d.get_group_rank, rank_states.tables

    def get_group_rank(group: Any, global_rank: int) -> int:
        if group is tables.default_pg:  # torch does the same in several steps
            return int(global_rank)
        members = _members(group)
        if members and global_rank not in members:
            raise ValueError(_not_a_member(global_rank, members))
        return int(number_in_group(group, global_rank))

    refuse_self = c10d._check_not_self_rank

    def check_not_self_rank(group: Any, rank: int, rank_type: str) -> None:
        try:
            refuse_self(group, rank, rank_type)
        except ValueError as error:
            members = _members(group)
            if not members or len(members) == rank_states.num_ranks:
                raise
            raise ValueError(f"{error} {_counts(members)}") from None

    replace(c10d, "_check_not_self_rank", check_not_self_rank)
    for owner in (c10d, dist):
        replace(owner, "get_group_rank", get_group_rank)


def _members(group: Any) -> list[int]:
    """Return the global ranks of a group; none for the world, or for an unknown group."""
    known = c10d._world.pg_group_ranks
    return [] if group is dist.GroupMember.WORLD or group not in known else [*known[group]]


def _not_a_member(rank: int, members: list[int]) -> str:
    return f"rank {rank} is not in the group of {rank_names(members)}. {_counts(members)}"


def _counts(members: list[int]) -> str:
    return (
        "src=, dst= and peer= count all ranks of the world; to count inside the group, from 0 to "
        f"{len(members) - 1}, give group_src=, group_dst= or group_peer= instead."
    )
