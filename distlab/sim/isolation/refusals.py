"""Calls that ``torch.distributed`` refuses: who has seen the error, and how it is worded.

A rank that catches such an error goes on or returns, while the others, which have not seen it, wait
for it. So the last error of each rank is kept for the report.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.c10d_logger as c10d_logger
import torch.distributed.distributed_c10d as c10d

from distlab.sim.engine.clock import Clock
from distlab.sim.engine.scheduler import Killed, Stopped
from distlab.sim.isolation.residents import Residents
from distlab.sim.reporting.errors import SimulationError
from distlab.words import rank_names

Replace = Callable[[Any, str, object], Any]  # (owner, name, value): what was there before


class Refusals:
    """By rank, the last error that a call of ``torch.distributed`` raised there."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[str, int]] = {}
        self._threads: dict[int, str] = {}

    def note(self, rank: int, call: str, error: BaseException | None, num_calls: int) -> None:
        """Keep an error, unless it only says that the world has ended.

        Args:
            rank: that got it.
            call: which raised it.
            error: None: there is none.
            num_calls: that have succeeded on this rank.
        """
        if error is not None and not isinstance(error, SimulationError | Stopped | Killed):
            self._by_rank[rank] = f"{call} raised {_line(error)}", num_calls

    def note_thread(self, rank: int, name: str, error: BaseException, where: str) -> None:
        """Keep the error that has ended a thread of a rank."""
        self._threads[rank] = (
            f"Thread {name!r} of rank {rank} ended with {_line(error)[:-1]}, {where}."
        )

    def thread_notes(self) -> Iterator[str]:
        """Say which errors have ended threads of ranks; Python only prints them."""
        for rank in sorted(self._threads):
            yield self._threads[rank]

    def notes(self, num_calls: Mapping[int, int]) -> Iterator[str]:
        """Say which errors ranks got instead of their last call, or the one before it.

        Args:
            num_calls: that have succeeded, by rank.
        """
        for rank, count in num_calls.items():
            what, before = self._by_rank.get(rank, ("", 0))
            if what and count - before < 2:
                yield (
                    f"On rank {rank}, {what} The exception was caught, so the other ranks know "
                    "nothing about it."
                )


def _line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(":")
    return text if text.endswith(".") else f"{text}."


def install(replace: Replace, clock: Clock, residents: Residents, refusals: Refusals) -> None:
    """Make torch's errors about ranks mention groups, and note what torch refuses."""
    describe_call = c10d_logger._get_msg_dict

    def note_and_describe(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        error = sys.exc_info()[1]
        if residents.is_in_rank():
            rank = clock.current.rank
            refusals.note(rank.number, name, error, rank.num_calls)
        with contextlib.suppress(Exception):  # it asks groups that a rank may not be in
            return describe_call(name, *args, **kwargs)
        return {}

    number_in_group, tables = c10d.get_group_rank, residents.tables

    def get_group_rank(group: Any, global_rank: int) -> int:
        if group is tables.default_pg:  # what torch does too, in several steps
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
            if not members or len(members) == residents.num_ranks:
                raise
            raise ValueError(f"{error} {_counts(members)}") from None

    replace(c10d_logger, "_get_msg_dict", note_and_describe)
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
