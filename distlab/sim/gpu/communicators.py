"""NCCL's communicators: which one a call uses, who takes part in its first use, and in which order.

A group has a communicator for its collectives and its batches of messages. A message that is not in
a batch has one of its own, of two ranks, unless ``init_process_group`` got a ``device_id``: then it
uses the group's as well. What shares a communicator runs one after another on its stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distlab.sim.gpu.orders import Orders
from distlab.sim.gpu.streams import Reached
from distlab.sim.messages.message import Communicator
from distlab.sim.messages.pending import Pending
from distlab.sim.messages.roster import MadeGroup
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.util.text import rank_names

Gpu = tuple[int, int]  # node, and number on it


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


@dataclass
class Communicators:
    """All communicators of a world.

    Attributes:
        made: Groups that the program has made, by key.
        orders: Orders in which ranks use them.
    """

    made: Mapping[object, MadeGroup] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)
    _firsts: dict[Communicator, dict[int, First]] = field(default_factory=dict)
    _members: dict[Communicator, tuple[int, ...]] = field(default_factory=dict)
    _gpus: dict[tuple[Communicator, int], list[Gpu]] = field(default_factory=dict)
    _places: dict[tuple[Communicator, int], dict[Gpu, tuple[int, Choice | None]]] = field(
        default_factory=dict
    )

    def used(
        self,
        key: Communicator,
        members: tuple[int, ...],
        operation: Pending,
        host: Reached,
        *,
        is_batch: bool,
        is_eager: bool,
    ) -> None:
        """Note that a rank uses a communicator; without a ``device_id``, its first use creates it.

        Args:
            host: What the rank's host has waited for.
        """
        firsts, rank = self._firsts.setdefault(key, {}), operation.rank
        if rank in firsts:
            return
        firsts[rank] = First(is_batch and not is_eager, operation.site)
        self._members[key] = members
        if not is_eager:
            self.orders.created(operation, key, members, host)

    def check_place(
        self,
        key: Communicator,
        number: int | None,
        rank: int,
        members: tuple[int, ...],
        gpu: Gpu,
        choice: Choice | None,
    ) -> None:
        """Raise if the ranks of a collective, or of messages, are on GPUs that do not go together.

        The n-th GPU of each rank is in the n-th of NCCL's communicators that stand behind ``key``.

        Args:
            number: Number of the collective in its group; None for a message.
            choice: How the rank has come to use the GPU, unless that is as it should be.

        Raises:
            RuntimeError: Another rank has the same GPU, for which NCCL has this error, too; or in a
                collective, one rank is on another of its GPUs than before and another rank is not,
                which hangs.
        """
        gpus = self._gpus.setdefault((key, rank), [])
        if gpu not in gpus:
            gpus.append(gpu)
        nth = gpus.index(gpu)
        call = (key, -1 - nth if number is None else number)
        places = self._places.setdefault(call, {})
        other, others_choice = places.setdefault(gpu, (rank, choice))
        if other != rank:
            raise _duplicate(gpu, {rank: choice, other: others_choice})
        for theirs, (peer, _) in places.items():
            if self._gpus[key, peer].index(theirs) != nth:
                raise _apart(rank, nth, gpus) if nth else _apart(peer, 1, self._gpus[key, peer])
        if len(places) == len(members):
            del self._places[call]

    def findings(self, *, has_ended: bool) -> Iterator[str]:
        """Yield a line for each wrong use.

        Args:
            has_ended: True if the world has ended without an error, so no calls are to come.
        """
        yield from self.orders.lines(self.made)
        if has_ended:
            yield from self._partial()

    def _partial(self) -> Iterator[str]:
        for key, firsts in self._firsts.items():
            missing = [rank for rank in self._members[key] if rank not in firsts]
            batches = [rank for rank, first in firsts.items() if first.is_batch]
            if batches and missing:
                yield _partial_first(firsts[batches[0]].site, batches, missing)


def _duplicate(gpu: Gpu, ranks: Mapping[int, Choice | None]) -> RuntimeError:
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


def _apart(rank: int, nth: int, gpus: Sequence[Gpu]) -> RuntimeError:
    return RuntimeError(
        f"rank {rank} is on cuda:{gpus[nth][1]} in this call, and was on cuda:{gpus[0][1]} in "
        "earlier ones of the group. NCCL makes a communicator for each GPU: this rank waits for "
        "the others to make a second one, and they wait for it in the first, so this hangs. "
        "all_gather_object and its like use torch.cuda.current_device(): call "
        "torch.cuda.set_device(local_rank) before init_process_group, and stay on that GPU"
    )


def _partial_first(site: Site, batches: Sequence[int], missing: Sequence[int]) -> str:
    return (
        f"{place(site)}: the group's first call is a batch of {rank_names(batches)}, without "
        f"{rank_names(missing)}: NCCL makes the group's communicator in it, for which all of its "
        "ranks have to call; begin with a collective, or give init_process_group a device_id"
    )
