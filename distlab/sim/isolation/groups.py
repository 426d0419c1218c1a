"""The process groups of ranks: the default group, and those that ``new_group`` makes."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from distlab.sim.isolation.own_stores import OwnStores
from distlab.sim.isolation.rank_states import RankWorld
from distlab.sim.messages.group import Shared, SimGroup
from distlab.sim.messages.limits import group_limit_s
from distlab.sim.messages.meetings import FOUNDING
from distlab.sim.messages.roster import MadeGroup
from distlab.sim.messages.store import SimStore
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import CallSite

BACKEND = "sim"
BACKEND_CONFIG = ",".join(f"{device}:{BACKEND}" for device in ("cpu", "cuda", "meta"))
TAG = "ptd:0"  # torch's tag for groups without a user-defined tag


class Groups:
    """Makes each rank's view of a group.

    Args:
        shared: The parts of the simulated world that all groups share.
        tables: Stand-in for torch's table of process groups, with the running rank's groups.
        is_in_rank: Function that returns whether the calling thread belongs to a rank.
        make_group: Function that makes a rank's view of a group.

    Attributes:
        store: The world's key-value store.
        own_stores: Stores that the program makes itself.
        made: All groups that the program has made, by key, in order of creation.
        asked: Settings of the program for the group that each rank is making.
    """

    def __init__(
        self,
        shared: Shared,
        tables: RankWorld,
        is_in_rank: Callable[[], bool],
        make_group: Callable[..., SimGroup] = SimGroup,
    ) -> None:
        make_store = partial(SimStore, shared.clock, shared.places)
        self.store, self.own_stores = make_store(), OwnStores(make_store, is_in_rank)
        self.made: dict[object, MadeGroup] = {}
        self.asked: dict[int, dict[str, Any]] = {}
        self._shared, self._tables, self._make_group = shared, tables, make_group
        num_ranks = shared.clock.num_ranks
        self._everyone = tuple(range(num_ranks))
        self._global_ranks = {rank: rank for rank in self._everyone}
        self._joins = [0] * num_ranks  # number of times that each rank has joined
        # Of each join: the first rank, its port, and the line at which it joins.
        self._ports: dict[int, tuple[int, str, str]] = {}

    def check_port(self, port: str) -> None:
        """Check that the running rank, which is about to join, meets the others at one port.

        Raises:
            RuntimeError: Another rank has another port; on real processes, both wait in vain.
        """
        rank, line = self._shared.clock.current.number, place(self._shared.places.line())
        mine = (rank, port, line)
        other, first, others_line = self._ports.setdefault(self._joins[rank], mine)
        if port != first:
            raise RuntimeError(
                f"rank {rank} would meet the others at port {port} ({line}), but rank {other} does "
                f"at port {first} ({others_line}): both wait until the time limit. Choose the port "
                "once, before the ranks start, and pass it on as MASTER_PORT"
            )

    def join(self, timeout: timedelta | None = None, **asked: Any) -> None:
        """Make the running rank's default process group.

        Args:
            timeout: Time limit of each operation.
            asked: Settings of the program for ``make_group``.
        """
        number = self._shared.clock.current.number
        self._joins[number] += 1
        key, limit_s = (self._joins[number], "0"), group_limit_s(timeout)
        group = self._make_group(self._shared, self._everyone, number, key, "0", limit_s, **asked)
        tables: dict[str, Any] = self._tables.__dict__
        tables["pg_map"][group] = (BACKEND, self.store)
        tables["pg_names"][group] = GroupName("0")
        tables["pg_backend_config"][group] = BACKEND_CONFIG
        tables["pg_group_ranks"][group] = self._global_ranks
        tables["pg_to_tag"][group] = TAG
        for tag in ("", TAG):
            tables["tags_to_pg"].setdefault(tag, []).append(group)
        tables.update(default_pg=group, group_count=1)
        self.show()

    def count_joins_alike(self) -> None:
        """Let the next default groups of all ranks be one, as if all had joined equally often."""
        self._joins = [max(self._joins)] * len(self._joins)

    def show(self) -> None:
        """Register the rank's groups by name, as functional collectives in this thread require."""
        register: Any = c10d._register_process_group  # type: ignore[attr-defined]
        for group, name in self._tables.__dict__["pg_names"].items():
            register(name, group)

    def make(
        self,
        ranks: tuple[int, ...],
        key: object,
        timeout: timedelta | None = None,
        description: str = "",
    ) -> SimGroup:
        """Make the running rank's view of a new group.

        As on gloo, the call returns only after all members have made the group.

        Args:
            ranks: Global ranks of the members; if empty, all ranks are members.
            key: Name that is unique among the rank's groups.
            timeout: Time limit of each operation on the group.
            description: Text for reports.

        Raises:
            Mismatch: another rank has made a group with different members under this key.
        """
        members, number = ranks or self._everyone, self._shared.clock.current.number
        place = (self._joins[number], key)  # a rank that joins again makes new groups
        call_site = self._shared.places.call_site()
        group = MadeGroup(members, call_site[0], description, number)
        first = self.made.setdefault(place, group)
        if first.members != members:
            error = first.mismatch(group)
            self._shared.failures.note(error)
            raise error
        rank, limit_s = members.index(number), group_limit_s(timeout)
        self._await_members(place, members, call_site, limit_s)
        return self._make_group(
            self._shared, members, rank, place, str(key), limit_s, **self.asked.pop(number, {})
        )

    def _await_members(
        self, place: object, members: tuple[int, ...], site: CallSite, limit_s: float
    ) -> None:
        self._shared.clock.act()
        founding = self._shared.meetings.at(("founding", place), members, 0)
        founding.arrive(FOUNDING, site).wait(group_limit_s=limit_s)
