"""Parameters that ranks share while their others differ, as beside tensor-parallel layers.

    rank 0    embedding   first half of a layer     head        embedding and head are shared, so
    rank 1    embedding   second half of it         head        their gradients have to be equal

Nothing declares which parameters are shared, so there has to be a reason to take them for it: ranks
with different parameters have computed the same loss, so they compute it together; or the others
are sharded DTensors. Then parameters with equal values are shared. A mistake is one whose gradients
differ, and whose values are never equal again: until then, ranks may average it later.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.values import Values, are_far_apart, is_equal, some_of
from distlab.util.text import rank_names

Ranks = tuple[int, ...]
Columns = Sequence[Sequence[Values]]  # for each parameter, its values on all ranks
Key = tuple[int, Ranks, tuple[object, ...]]  # optimizer, ranks, names and shapes
_TOGETHER = (
    "though these ranks compute one loss together. Sum their gradients over the ranks, or those of "
    "the input of the layers that are split"
)
_BESIDE = "beside parameters that are sharded. Average their gradients, or shard them, too"


@dataclass
class _Suspects:
    """Shared parameters whose gradients differed in a step."""

    step: int
    site: Site
    names: list[str]
    reason: str
    have_parted: bool = False  # True if the values have differed since


class Shared:
    """Watches the shared parameters of ranks that are not replicas."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._suspects: dict[Key, _Suspects] = {}

    def judge(
        self,
        optimizer: int,
        step: int,
        site: Site,
        values: Mapping[int, Sequence[Values]],
        losses: Mapping[int, Sequence[float]],
    ) -> None:
        """Compare the parameters and gradients of all ranks before a step.

        Args:
            optimizer: Number of the optimizer on each rank.
            step: Number of the step, from 1.
            site: The program's line.
            values: Parameters of the optimizer by rank.
            losses: Losses from which each rank has gone back since its last step.
        """
        for (number, ranks, known), suspects in self._suspects.items():
            if number == optimizer and all(_layout(values.get(rank, ())) == known for rank in ranks):
                _look_again(suspects, _columns(ranks, values))
        by_layout: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, mine in sorted(values.items()):
            by_layout[_layout(mine)].append(rank)
        for layout, alike in by_layout.items():
            has_dtensors = any(v.is_sharded for v in values[alike[0]])
            groups = [tuple(alike)] if has_dtensors else with_one_loss(alike, losses)
            for ranks in groups:
                if (key := (optimizer, ranks, layout)) not in self._suspects:
                    self._compare(key, step, site, _columns(ranks, values))

    def _compare(self, key: Key, step: int, site: Site, columns: Columns) -> None:
        """Look for suspects."""
        has_dtensors = any(column[0].is_sharded for column in columns)
        if names := _suspects(columns, has_dtensors=has_dtensors):
            reason = _BESIDE if has_dtensors else _TOGETHER
            self._suspects[key] = _Suspects(step, site, names, reason)

    def ended(self) -> None:
        """Report the suspects that have parted for good; called at the end of the world."""
        for (_, ranks, _), suspects in self._suspects.items():
            if suspects.names and suspects.have_parted:
                self._report(ranks, suspects)

    def _report(self, ranks: Ranks, suspects: _Suspects) -> None:
        self._findings.add(
            ("shared", suspects.site),
            f"step {suspects.step}: {some_of(suspects.names)} had equal values on "
            f"{rank_names(ranks)}, got different gradients, and have differed since, "
            f"{suspects.reason}; {place(suspects.site)}",
        )


def _layout(values: Sequence[Values]) -> tuple[object, ...]:
    return tuple((v.name, v.shape) for v in values)


def _columns(ranks: Ranks, values: Mapping[int, Sequence[Values]]) -> Columns:
    return [*zip(*(values[rank] for rank in ranks), strict=True)]


def with_one_loss(ranks: Sequence[int], losses: Mapping[int, Sequence[float]]) -> list[Ranks]:
    """Return the sets of two or more ranks that have computed the same losses, but for rounding."""
    groups = list[list[int]]()
    for rank in ranks:
        group = next((g for g in groups if _are_close(losses[g[0]], losses[rank])), None)
        if group is None:
            groups.append(group := [])
        group.append(rank)
    return [tuple(group) for group in groups if len(group) > 1 and any(losses[group[0]])]


def _are_close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(isclose(a, b, rel_tol=1e-4) for a, b in pairs)


def _suspects(columns: Columns, *, has_dtensors: bool) -> list[str]:
    """Return the names of the shared parameters whose gradients differ."""
    if not has_dtensors and all(is_equal(v.value for v in column) for column in columns):
        return []  # the ranks are replicas
    equal = [column for column in columns if is_equal(v.value for v in column)]
    split = {c[0].holder for c in columns if not is_equal(v.value for v in c)}
    drawn = {column[0].holder for column in equal if _is_drawn(column[0])}
    shared = [
        column
        for column in equal
        if (has_dtensors and not column[0].is_sharded)
        or _is_drawn(column[0])
        or (column[0].holder not in split and (column[0].is_of_norm or column[0].holder in drawn))
    ]
    return [c[0].name for c in shared if are_far_apart([v.gradient for v in c])]


def _is_drawn(parameter: Values) -> bool:
    """Return whether values are random, and so equal only if ranks mean them to be.

    Zeros, ones and repeated rows are what shards of split parameters begin with, too.
    """
    value = parameter.value
    return value is not None and not value.is_constant and not value.has_equal_rows


def _look_again(suspects: _Suspects, columns: Iterable[Sequence[Values]]) -> None:
    """Drop the suspects whose values are equal again."""
    equal = {column[0].name for column in columns if is_equal(v.value for v in column)}
    suspects.names = [name for name in suspects.names if name not in equal]
    suspects.have_parted = True
