"""Parameters that ranks share while their others differ, as beside tensor-parallel layers.

    rank 0    embedding   first half of a layer     head        embedding and head are shared, so
    rank 1    embedding   second half of it         head        their gradients have to be equal

Nothing declares which parameters are shared. One is if it has equal values on all ranks whose
optimizers hold tensors of the same names and shapes, not constant ones as new biases have. A
mistake is a shared parameter whose gradients differ, beside one whose gradients are equal, if its
values differ before the next step, too: until then, the ranks may still average them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.sim.sanitizer.findings import Findings
from distlab.sim.sanitizer.values import Values, is_equal, is_same, names_of
from distlab.util.text import rank_names

Ranks = tuple[int, ...]


class _Suspects(NamedTuple):
    """Shared parameters whose gradients differed in a step."""

    step: int
    site: Site
    numbers: Sequence[int]  # of the parameters in their optimizer
    example: str  # name of a shared parameter whose gradients are equal


class Shared:
    """Watches the shared parameters of ranks that are not replicas."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._suspects: dict[tuple[int, Ranks], _Suspects] = {}

    def judge(
        self, optimizer: int, step: int, site: Site, values: Mapping[int, Sequence[Values]]
    ) -> None:
        """Compare the parameters and gradients of all ranks before a step."""
        for ranks in _alike_in_shape(values):
            columns = [*zip(*(values[rank] for rank in ranks), strict=True)]
            suspects = self._suspects.pop((optimizer, ranks), None)
            if suspects:
                self._report(ranks, suspects, columns)
            elif new := _suspects(step, site, columns):
                self._suspects[optimizer, ranks] = new

    def _report(
        self, ranks: Ranks, suspects: _Suspects, columns: Sequence[Sequence[Values]]
    ) -> None:
        """Report suspects whose values differ by now."""
        parted = [columns[number] for number in suspects.numbers]
        parted = [column for column in parted if not is_equal(v.value for v in column)]
        if parted:
            self._findings.add(
                ("shared", suspects.site),
                f"step {suspects.step}: {names_of(parted)} had equal values on "
                f"{rank_names(ranks)} and got different gradients, so the values differ now. The "
                f"gradients of {suspects.example} were equal. A parameter beside split layers "
                "needs the sum of the ranks' gradients, by an all-reduce where the split layers "
                f"begin, or of the gradient itself; {place(suspects.site)}",
            )


def _alike_in_shape(values: Mapping[int, Sequence[Values]]) -> list[Ranks]:
    """Return the sets of two or more ranks with tensors of the same names and shapes."""
    by_shapes: defaultdict[object, list[int]] = defaultdict(list)
    for rank, mine in values.items():
        by_shapes[tuple((v.name, v.shape) for v in mine)].append(rank)
    return [tuple(sorted(ranks)) for ranks in by_shapes.values() if len(ranks) > 1]


def _suspects(step: int, site: Site, columns: Sequence[Sequence[Values]]) -> _Suspects | None:
    """Return the shared parameters whose gradients differ; None if that may be right."""
    if all(is_equal(v.value for v in column) for column in columns):
        return None  # the ranks are replicas
    gradients = [[v.gradient for v in column] for column in columns]
    shared = [k for k, column in enumerate(columns) if is_same([v.value for v in column])]
    right = [k for k in shared if is_same(gradients[k])]
    wrong = [k for k in shared if all(gradients[k]) and not is_equal(gradients[k])]
    return _Suspects(step, site, wrong, columns[right[0]][0].name) if right and wrong else None
