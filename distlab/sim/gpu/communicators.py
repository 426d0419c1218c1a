"""NCCL's communicators: which one a call uses, who takes part in its first use, and in which order.

A group has a communicator for its collectives and its batches of messages. A message that is not in
a batch has one of its own, of two ranks, unless ``init_process_group`` got a ``device_id``: then it
uses the group's as well. What shares a communicator runs one after another on its stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distlab.sim.gpu.streams import Reached, Stream
from distlab.sim.messages.group_names import GroupNames
from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Communicator
from distlab.sim.messages.roster import MadeGroup
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.util.text import rank_names

Call = tuple[object, int]  # (identity of the group, number of the collective)


class Choice(NamedTuple):
    """A rank's choice of another GPU than that of its LOCAL_RANK.

    Attributes:
        number: Number of the GPU, as the rank sees it.
        site: Line that calls ``torch.cuda.set_device``.
    """

    number: int
    site: Site
    local_rank: int

    def text(self, rank: int) -> str:
        """Return the choice, and what to do about it, as a sentence."""
        return (
            f"Rank {rank} chose it by torch.cuda.set_device({self.number}) at {place(self.site)}, "
            f"but its LOCAL_RANK is {self.local_rank}: pass that"
        )


class First(NamedTuple):
    """A rank's first use of a communicator."""

    is_batch: bool
    site: Site


class Open(NamedTuple):
    """A collective on one rank's stream, and where in its stream."""

    attendance: Attendance
    stream: Stream
    number: int

    @property
    def call(self) -> Call:
        """The collective that other ranks attend, too."""
        return self.attendance.meeting.key, self.attendance.meeting.number


class Order(NamedTuple):
    """One rank's order of two collectives on two communicators, which nothing else orders."""

    rank: int
    first: Open
    second: Open


@dataclass
class Communicators:
    """All communicators of a world.

    Attributes:
        made: Groups that the program has made, by key.
    """

    made: Mapping[object, MadeGroup] = field(default_factory=dict)
    _firsts: dict[Communicator, dict[int, First]] = field(default_factory=dict)
    _members: dict[Communicator, tuple[int, ...]] = field(default_factory=dict)
    _gpus: dict[tuple[Communicator, int], list[tuple[int, int]]] = field(default_factory=dict)
    _places: dict[tuple[Communicator, int], dict[tuple[int, int], tuple[int, Choice | None]]] = (
        field(default_factory=dict)
    )
    _open: dict[int, list[Open]] = field(default_factory=dict)
    _orders: dict[tuple[Call, Call], Order] = field(default_factory=dict)
    _crossed: dict[tuple[Call, Call], tuple[Order, Order]] = field(default_factory=dict)

    def used(
        self, key: Communicator, members: tuple[int, ...], rank: int, site: Site, *, is_batch: bool
    ) -> None:
        """Note that a rank uses a communicator."""
        firsts = self._firsts.setdefault(key, {})
        if rank not in firsts:
            firsts[rank] = First(is_batch, site)
            self._members[key] = members

    def check_place(
        self, key: Communicator, rank: int, gpu: tuple[int, int], choice: Choice | None
    ) -> None:
        """Raise if two ranks of a communicator use one GPU.

        The n-th GPU of each rank is in the n-th of NCCL's communicators that stand behind ``key``.

        Args:
            gpu: Node and number on it.
            choice: How the rank has come to use the GPU, unless that is as it should be.

        Raises:
            RuntimeError: Another rank has the same GPU; NCCL ends with this error, too.
        """
        gpus = self._gpus.setdefault((key, rank), [])
        if gpu not in gpus:
            gpus.append(gpu)
        places = self._places.setdefault((key, gpus.index(gpu)), {})
        other, others_choice = places.setdefault(gpu, (rank, choice))
        if other != rank:
            raise _duplicate(gpu, {rank: choice, other: others_choice})

    def launched(self, rank: int, launched: Open, reached: Reached) -> None:
        """Compare the order of a rank's collectives on several communicators with other ranks'."""
        still_open = [o for o in self._open.get(rank, ()) if reached.get(o.stream, 0) < o.number]
        for earlier in still_open:
            if earlier.call[0] != launched.call[0]:
                self._compare(Order(rank, earlier, launched))
        self._open[rank] = [*still_open, launched]

    def _compare(self, mine: Order) -> None:
        calls = mine.first.call, mine.second.call
        self._orders.setdefault(calls, mine)
        other = self._orders.get(calls[::-1])
        if other is not None and other.rank != mine.rank:
            self._crossed.setdefault(calls[::-1], (other, mine))

    def crossed(self) -> Iterator[str]:
        """Yield a line for each two collectives that ranks launch in opposite orders."""
        lines = (_crossed(one, other, self.made) for one, other in self._crossed.values())
        yield from dict.fromkeys(lines)

    def findings(self) -> Iterator[str]:
        """Yield a line for each wrong use; the world must have ended without an error."""
        yield from self.crossed()
        for key, firsts in self._firsts.items():
            missing = [rank for rank in self._members[key] if rank not in firsts]
            batches = [rank for rank, first in firsts.items() if first.is_batch]
            if batches and missing:
                yield _partial_first(firsts[batches[0]].site, batches, missing)


def _duplicate(gpu: tuple[int, int], ranks: Mapping[int, Choice | None]) -> RuntimeError:
    node, number = gpu
    chosen = [choice.text(rank) for rank, choice in sorted(ranks.items()) if choice]
    remedy = chosen or [
        "Call torch.cuda.set_device(local_rank) before init_process_group, with LOCAL_RANK from "
        "the environment"
    ]
    return RuntimeError(
        f"Duplicate GPU detected : ranks {min(ranks)} and {max(ranks)} both use cuda:{number} of "
        f"node {node}. {'. '.join(remedy)}"
    )


def _crossed(one: Order, other: Order, made: Mapping[object, MadeGroup]) -> str:
    calls = one.first.attendance, one.second.attendance
    names = GroupNames(calls, made)
    first, second = (
        f"{call.title()}{' on ' * bool(names.name(call))}{names.name(call)} ({call.where()})"
        for call in calls
    )
    return (
        f"rank {one.rank} launches {first} before {second}, and rank {other.rank} the other way "
        f"round ({other.first.attendance.where()}, then {other.second.attendance.where()}): "
        "kernels of two communicators may wait for each other for ever; use one order on all "
        "ranks, or wait for one before the other"
    )


def _partial_first(site: Site, batches: Sequence[int], missing: Sequence[int]) -> str:
    return (
        f"{place(site)}: the group's first call is a batch of {rank_names(batches)}, without "
        f"{rank_names(missing)}: NCCL makes the group's communicator in it, for which all of its "
        "ranks have to call; begin with a collective, or give init_process_group a device_id"
    )
