"""Copies of the same shard of a DTensor, which have to be equal, as in hybrid sharding.

              shard 0     shard 1
replica 0     rank 0      rank 1      mesh of (2, 2), placements (Replicate, Shard(0)):
replica 1     rank 2      rank 3      ranks 0 and 2 hold copies, and so do ranks 1 and 3

Each DTensor declares its mesh, and along which dimensions of it the ranks hold copies. If its mesh
is a part of another one, as ``mesh["shard"]`` is, ranks along the other dimensions hold copies,
too, if their shards began with equal random values, and they have exchanged nothing since, as
stages and experts do.

Copies may differ for a while if ranks average parameters now and then, so a mistake are those that
are never equal again, and about which the ranks have not spoken after their last step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.sim.results.simulated import StepOf
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.meshes import Ranks, along
from distlab.sim.sanitizer.parameters import Digest, Parameters, digest, distinct_names
from distlab.sim.sanitizer.values import is_equal, is_equal_not_by_chance
from distlab.util.text import joined, rank_names, some_of, told_apart

Key = tuple[int, Ranks, str]  # optimizer, ranks that hold copies, name of the parameter
MAX_NORMS = 4


class _Copy(NamedTuple):
    """A rank's copy of a shard.

    Attributes:
        name: Name of the parameter.
        ranks: Ranks that hold copies of this shard, in order.
        is_declared: True if the DTensor says so.
    """

    name: str
    parameter: ref[Tensor]
    ranks: Ranks
    is_declared: bool


class _Moment(NamedTuple):
    """A time at which copies are compared: before or after a step of an optimizer."""

    optimizer: int
    number: int  # of the step, from 1
    is_after: bool


_BEGIN_EQUAL = (
    "Begin with equal parameters, from one seed or one file on all of them: fully_shard and "
    "DTensor.from_local do not broadcast"
)
_AVERAGE = (
    "Average gradients over these ranks, too, as fully_shard does if its mesh has a dimension for "
    "them. If that is done, something else has changed the copies, such as another learning rate "
    "or a state that was restored on some ranks only"
)

_CHANGED = "Something besides the steps has changed them: load or set weights on all ranks alike"


@dataclass
class _Parted:
    """Copies that differ."""

    since: _Moment
    site: Site
    name: str
    norms: tuple[float, ...]  # by rank
    have_spoken: bool = False  # True if the ranks may have averaged them since their last step


class MeshCopies:
    """Watches the copies of shards that the ranks optimize."""

    def __init__(self, findings: Findings, parameters: Parameters) -> None:
        self._findings, self._parameters = findings, parameters
        # The copies in the step that each rank's optimizer takes.
        self._begun: dict[tuple[int, int], tuple[_Moment, Site, list[_Copy]]] = {}
        # The values of each parameter's copies on the ranks that have come to a moment.
        self._values: defaultdict[tuple[_Moment, Ranks, str], dict[int, Digest | None]] = (
            defaultdict(dict)
        )
        self._alike: defaultdict[Ranks, set[Key]] = defaultdict(set)  # undeclared copies
        self._parted: dict[Key, _Parted] = {}
        self._averaged: set[Key] = set()  # those that were equal again

    def steps(self, rank: int, at: StepOf, optimizer: Optimizer, site: Site) -> None:
        """Look at the copies that a rank has before a step."""
        moment = _Moment(at.optimizer, at.step + 1, is_after=False)
        self._begun[rank, at.optimizer] = moment, site, self._copies(optimizer)
        self._look(rank, *self._begun[rank, at.optimizer])

    def stepped(self, rank: int, optimizer: int) -> None:
        """Look at the copies that a rank has after a step."""
        moment, site, copies = self._begun[rank, optimizer]
        self._look(rank, moment._replace(is_after=True), site, copies)

    def spoke(self, ranks: Iterable[int]) -> None:
        """Note that ranks have exchanged more than a few numbers."""
        speakers = {*ranks}
        for others in [others for others in self._alike if len(speakers & {*others}) > 1]:
            for key in self._alike.pop(others):
                self._parted.pop(key, None)
        for (_, copies, _), parted in self._parted.items():
            parted.have_spoken |= len(speakers & {*copies}) > 1

    def ended(self) -> None:
        """Report copies that have parted for good; called at the end of the world."""
        by_cause: defaultdict[tuple[_Moment, Site, Ranks], list[_Parted]] = defaultdict(list)
        for (_, ranks, _), parted in self._parted.items():
            if not parted.have_spoken:
                by_cause[parted.since, parted.site, ranks].append(parted)
        for (moment, site, ranks), group in by_cause.items():
            self._report(moment, site, ranks, group)

    def _copies(self, optimizer: Optimizer) -> list[_Copy]:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        names = distinct_names(self._parameters, params)
        return [
            _Copy(name, ref(parameter), *holders)
            for name, parameter in zip(names, params, strict=True)
            if isinstance(parameter, DTensor)
            for holders in _holders(parameter)
        ]

    def _look(self, rank: int, moment: _Moment, site: Site, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            values = self._values[moment, copy.ranks, copy.name]
            values[rank] = digest(copy.parameter())
            if len(values) == len(copy.ranks):
                del self._values[moment, copy.ranks, copy.name]
                found = [values[rank] for rank in copy.ranks]
                if copy.is_declared or self._are_alike(moment, copy, found):
                    self._compare(moment, site, copy, found)

    def _are_alike(self, moment: _Moment, copy: _Copy, found: Sequence[Digest | None]) -> bool:
        """Return whether undeclared copies were equal before the first step."""
        key = moment.optimizer, copy.ranks, copy.name
        is_start = moment.number == 1 and not moment.is_after
        if is_start and is_equal_not_by_chance(found):
            self._alike[copy.ranks].add(key)
        return key in self._alike.get(copy.ranks, ())

    def _compare(
        self, moment: _Moment, site: Site, copy: _Copy, found: Sequence[Digest | None]
    ) -> None:
        key = moment.optimizer, copy.ranks, copy.name
        if is_equal(found):
            if self._parted.pop(key, None):
                self._averaged.add(key)
        elif key in self._parted:
            self._parted[key].have_spoken = False  # but they still differ
        elif key not in self._averaged:
            norms = tuple(value.norm if value else 0.0 for value in found)
            parameter = copy.parameter()
            name = copy.name if parameter is None else self._parameters.name_anywhere(parameter)
            self._parted[key] = _Parted(moment, site, name, norms)

    def _report(self, moment: _Moment, site: Site, ranks: Ranks, group: Sequence[_Parted]) -> None:
        when = "after" if moment.is_after else "before"
        advice = _AVERAGE
        if not moment.is_after:
            advice = _BEGIN_EQUAL if moment.number == 1 else _CHANGED
        self._findings.add(
            ("copies", site),
            f"step {moment.number}: {rank_names(ranks)} hold copies of the same shards, which "
            f"differ {when} it, and were never equal again: {some_of([p.name for p in group])} "
            f"(norm {joined(told_apart(group[0].norms[:MAX_NORMS], 6))}). "
            f"{advice}; {place(site)}",
        )


def _holders(parameter: DTensor) -> Iterator[tuple[Ranks, bool]]:
    """Yield ranks that hold copies of this rank's shard, and True, or that may, and False."""
    mesh, placements = parameter.device_mesh, parameter.placements
    is_split = any(p.is_shard() for p in placements) and not any(p.is_partial() for p in placements)
    if not is_split:
        return
    if len(declared := along(mesh, [p.is_replicate() for p in placements])) > 1:
        yield declared, True
    whole = mesh._get_root_mesh()
    mine, names = mesh.mesh_dim_names or (), whole.mesh_dim_names or ()
    for other in names if {*mine} < {*names} else ():
        if other not in mine and len(ranks := along(whole, [n == other for n in names])) > 1:
            yield ranks, False
