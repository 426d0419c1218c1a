"""Record which ranks saw a ``torch.distributed`` call fail, and make torch's errors clearer.

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
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.errors import SimulationError
from distlab.sim.reporting.report import WHO, error_line, merged_notes, place
from distlab.sim.reporting.sites import Places
from distlab.util.replacing import Replace
from distlab.util.text import rank_names

_LISTS = {  # call -> its argument that lists one object per rank
    "all_gather_object": "object_list",
    "gather_object": "object_gather_list",
    "scatter_object_list": "scatter_object_input_list",
}


class Refusals:
    """The last error that a ``torch.distributed`` call raised on each rank."""

    def __init__(self, clock: Clock, rank_states: RankStates, exits: Exits, places: Places) -> None:
        self._clock, self._rank_states = clock, rank_states
        self._exits, self._places = exits, places
        self._by_rank: dict[int, tuple[str, int]] = {}  # (error, number of calls before it)
        self._outside: dict[int, str] = {}  # rank -> its call on a group that it is not in

    def begin_run(self) -> None:
        """Forget the errors of earlier runs."""
        self._by_rank.clear()
        self._outside.clear()

    def outside_note(self, rank: int) -> str:
        """Return a note on a call that torch skipped with only a warning; "" if there was none."""
        call = self._outside.get(rank)
        return f"Before, rank {rank} {call}: torch has left out that call." if call else ""

    def notes(self, num_calls: Mapping[int, int]) -> list[str]:
        """Return notes on ranks' last errors, unless two or more successful calls have followed.

        Args:
            num_calls: Number of successful calls of each rank.
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

    def install(self, replace: Replace) -> None:
        """Make torch's errors say what to change in the program, and record refused calls."""
        self._note_refusals(replace)
        self._speak_of_members(replace)
        self._refuse_self(replace)
        self._speak_of_the_end(replace)
        _speak_of_parameters(replace)
        replace(c10d, "_warn_not_in_group", self._warn_and_note)

    def _note_refusals(self, replace: Replace) -> None:
        """Record each error, unless it only says that the world has ended."""

        def note_and_describe(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
            error = sys.exc_info()[1]
            if self._rank_states.is_in_rank():
                _speak_of_objects(name, error, args, kwargs)
                rank = self._clock.current.rank
                if error is not None and not isinstance(error, SimulationError | Stopped | Killed):
                    text = f"{name} raised {error_line(error)}."
                    self._by_rank[rank.number] = text, rank.num_calls
            with contextlib.suppress(Exception):  # torch's function fails outside of a group
                return dict(describe_call(name, *args, **kwargs))
            return {}

        describe_call = replace(c10d_logger, "_get_msg_dict", note_and_describe)

    def _warn_and_note(self, call: str) -> None:
        """Warn about a call that torch skips with only a warning, and record it for the report."""
        rank, site = self._rank_states.current, self._places.call_site()[0]
        self._outside.setdefault(rank, f"called {call} on a group that it is not in, {place(site)}")
        text = f"rank {rank} calls {call} on a group that it is not in: the call is left out"
        warnings.warn_explicit(text, UserWarning, site[0] or "distlab", site[1])

    def _speak_of_the_end(self, replace: Replace) -> None:
        """Make errors after ``destroy_process_group`` say where the rank called it."""
        exits, states = self._exits, self._rank_states

        def update_default_group(group: Any) -> None:
            if group is None and states.is_in_rank():  # called by destroy_process_group()
                exits.left(states.current)
            update(group)

        def get_default_group() -> Any:
            left_at = exits.left_groups.get(states.current)
            if left_at is None or dist.is_initialized():
                return find()
            raise ValueError(
                f"rank {states.current} has destroyed its process group at {place(left_at)}. "
                "Communicate before that, or begin anew: destroy_process_group() on the ranks that "
                "still have one, then init_process_group() on all"
            )

        update = replace(c10d, "_update_default_pg", update_default_group)
        find = replace(c10d, "_get_default_group", get_default_group)

    def _speak_of_members(self, replace: Replace) -> None:
        """Make torch's error about a rank outside a group name the group's ranks."""
        number_in_group, tables = c10d.get_group_rank, self._rank_states.tables

        def get_group_rank(group: Any, global_rank: int) -> int:
            if group is tables.default_pg:  # same result as torch's function, but faster
                return int(global_rank)
            members = _members(group)
            if members and global_rank not in members:
                raise ValueError(
                    f"rank {global_rank} is not in the group of {rank_names(members)}. "
                    f"{_counts(members)}"
                )
            return int(number_in_group(group, global_rank))

        for owner in (c10d, dist):
            replace(owner, "get_group_rank", get_group_rank)

    def _refuse_self(self, replace: Replace) -> None:
        """Make torch's error about a message to oneself explain how a group counts its ranks."""

        def check_not_self_rank(group: Any, rank: int, rank_type: str) -> None:
            try:
                check(group, rank, rank_type)
            except ValueError as error:
                members = _members(group)
                if not members or len(members) == self._rank_states.num_ranks:
                    raise
                raise ValueError(f"{error} {_counts(members)}") from None

        check = replace(c10d, "_check_not_self_rank", check_not_self_rank)


def _speak_of_parameters(replace: Replace) -> None:
    """Make errors of DistributedDataParallel name parameters, as with TORCH_DISTRIBUTED_DEBUG."""

    torch_dist: Any = dist  # its stubs lack the levels

    def make_reducer(*args: Any, **kwargs: Any) -> Any:
        level = torch_dist.get_debug_level()
        torch_dist.set_debug_level(max(level, torch_dist.DebugLevel.INFO, key=int))
        try:
            return make(*args, **kwargs)  # which keeps the level
        finally:
            torch_dist.set_debug_level(level)

    make = replace(dist, "Reducer", make_reducer)


def _speak_of_objects(
    name: str, error: BaseException | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make errors of object collectives name the list of objects, not the tensors made from it."""
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


def _members(group: Any) -> list[int]:
    """Return the global ranks of a group; [] for the world or an unknown group."""
    known = c10d._world.pg_group_ranks
    return [] if group is dist.GroupMember.WORLD or group not in known else [*known[group]]


def _counts(members: list[int]) -> str:
    return (
        "src=, dst= and peer= count all ranks of the world; to count inside the group, from 0 to "
        f"{len(members) - 1}, give group_src=, group_dst= or group_peer= instead."
    )
