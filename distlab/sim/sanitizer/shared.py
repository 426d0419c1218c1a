"""Parameters that ranks share while their others differ, as beside tensor-parallel layers.

    rank 0    embedding   first half of a layer     head        embedding and head are shared, so
    rank 1    embedding   second half of it         head        their gradients have to be equal

Nothing declares which parameters are shared, so there has to be a reason to take them for it:

- ranks with different parameters have computed the same loss, so they compute it together;
- or the others are sharded DTensors;
- or ranks give another parameter equal gradients, and get gradients back from other ranks, as
  through split sequences or experts;
- or ranks get gradients back from one another, and all parameters are equal but those in layers
  that see what an all_gather or an all_to_all has brought from all ranks.

Then parameters with equal values are shared. A mistake is one whose gradients differ, and whose
values are never equal again: until then, ranks may average it later.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.recorder import Step
from distlab.sim.sanitizer.values import Values, are_far_apart, is_equal
from distlab.util.text import rank_names, some_of

Ranks = tuple[int, ...]
Columns = Sequence[Sequence[Values]]  # for each parameter, its values on all ranks
Key = tuple[int, Ranks, tuple[object, ...]]  # optimizer, ranks, names and shapes
_TOGETHER = (
    "though these ranks compute one loss together. Sum their gradients over the ranks, or those of "
    "the input of the layers that are split"
)
_BESIDE = "beside parameters that are sharded. Average their gradients, or shard them, too"
_KEPT = (
    "though these ranks go back through one another's layers, and keep other parameters equal. Sum "
    "their gradients over the ranks, too"
)
_AROUND = (
    "though these ranks go back through one another's layers, and only layers that see what all of "
    "them give differ, as in sequence parallelism. Sum their gradients over the ranks, too"
)


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

    def judge(self, step: Step) -> None:
        """Compare the parameters and gradients of all ranks before a step."""
        self._look_again(step)
        by_layout: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, mine in sorted(step.values.items()):
            by_layout[_layout(mine)].append(rank)
        for layout, alike in by_layout.items():
            for ranks, reason in _groups(alike, step):
                self._suspect((step.optimizer, ranks, layout), step, reason)

    def _suspect(self, key: Key, step: Step, reason: str) -> None:
        if key in self._suspects:
            return
        if names := _suspects(_columns(key[1], step.values), reason):
            self._suspects[key] = _Suspects(step.number, step.site, names, reason)

    def _look_again(self, step: Step) -> None:
        """Look at known suspects again, whether or not there is still a reason to."""
        for (number, ranks, layout), suspects in self._suspects.items():
            are_here = all(_layout(step.values.get(rank, ())) == layout for rank in ranks)
            if number == step.optimizer and are_here:
                _drop_equal(suspects, _columns(ranks, step.values))

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


def _groups(alike: Sequence[int], step: Step) -> Iterator[tuple[Ranks, str]]:
    """Yield sets of ranks that may share parameters, and why, given those of one layout."""
    if any(v.is_sharded for v in step.values[alike[0]]):
        yield tuple(alike), _BESIDE
        return
    for ranks in with_one_loss(alike, step.losses):
        yield ranks, _TOGETHER
    for ranks in _that_keep_equal(alike, step.values):
        yield ranks, _KEPT
    for ranks in step.back_through:
        if {*ranks} <= {*alike}:
            yield ranks, _AROUND


def _that_keep_equal(alike: Iterable[int], values: Mapping[int, Sequence[Values]]) -> list[Ranks]:
    """Return the sets of ranks that have a parameter in common, and its gradient; largest first.

    Only ranks count whose gradients come back from others.
    """
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for rank in (rank for rank in alike if any(v.has_come_back for v in values[rank])):
        for number, v in enumerate(values[rank]):
            if _is_drawn(v) and v.value and v.gradient and not v.gradient.is_constant:
                groups[number, v.value.key, v.gradient.key].append(rank)
    return sorted({tuple(g) for g in groups.values() if len(g) > 1}, key=len, reverse=True)


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


def _suspects(columns: Columns, reason: str) -> list[str]:
    """Return the names of the shared parameters whose gradients differ."""
    has_dtensors = reason == _BESIDE
    if not has_dtensors and all(is_equal(v.value for v in column) for column in columns):
        return []  # the ranks are replicas
    if reason == _AROUND:
        return _around(columns)
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
    wrong = [column for column in shared if are_far_apart([v.gradient for v in column])]
    return [c[0].name for c in wrong if reason != _KEPT or not any(map(_may_be_own, c))]


def _around(columns: Columns) -> list[str]:
    """Return the names of parameters around split layers whose gradients differ.

    If any parameter there is another one on each rank, so may be those that begin alike.
    """
    around = [column for column in columns if not any(v.is_of_gathered for v in column)]
    if not all(is_equal(v.value for v in column) for column in around):
        return []
    wrong = [column for column in around if are_far_apart([v.gradient for v in column])]
    return [column[0].name for column in wrong if all(v.has_come_back for v in column)]


def _may_be_own(parameter: Values) -> bool:
    """Return whether a parameter may be one of an expert, or of the norm of a rank's own head."""
    return parameter.is_of_gathered or (parameter.is_of_norm and not parameter.has_come_back)


def _is_drawn(parameter: Values) -> bool:
    """Return whether values are random, and so equal only if ranks mean them to be.

    Zeros, ones and repeated rows are what shards of split parameters begin with, too.
    """
    value = parameter.value
    return value is not None and not value.is_constant and not value.has_equal_rows


def _drop_equal(suspects: _Suspects, columns: Iterable[Sequence[Values]]) -> None:
    """Drop the suspects whose values are equal again."""
    equal = {column[0].name for column in columns if is_equal(v.value for v in column)}
    suspects.names = [name for name in suspects.names if name not in equal]
    suspects.have_parted = True
