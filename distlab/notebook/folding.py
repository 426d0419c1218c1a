"""Ranks that have shown the same, folded into one; and values side by side.

ranks 0-7: hello               what all have printed
(2,) float32                   tensors of one shape, side by side
  ranks 0-6   28   1
  rank 7      27*  1           unlike most
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from distlab.notebook.output import RankOutput

MAX_COLUMNS = 12  # elements of a tensor that a table shows
MAX_ROWS = 16  # ranks that a table shows


class Fold(NamedTuple):
    """Ranks that have shown the same."""

    ranks: Sequence[int]
    output: RankOutput


class Table(NamedTuple):
    """A tensor of each rank, one row per rank.

    Attributes:
        title: Shape and dtype.
        rows: Ranks with equal values, and the values.
        usual: For each column, the value of most ranks; "" if no value is that of most.
        num_hidden: Number of columns left out.
    """

    title: str
    rows: Sequence[tuple[Sequence[int], Sequence[str]]]
    usual: Sequence[str]
    num_hidden: int


def folded(outputs: Mapping[int, RankOutput], *, has_values: bool) -> list[Fold]:
    """Return the ranks that have shown anything, with equal ones together, in order of ranks.

    Args:
        has_values: False if the values are shown in a table.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank, output in sorted(outputs.items()):
        if not output.is_empty:
            groups.setdefault(output.key(has_value=has_values), []).append(rank)
    return [Fold(ranks, outputs[ranks[0]]) for ranks in groups.values()]


def table(values: Mapping[int, Any]) -> Table | None:
    """Return small tensors of one shape, side by side; None if that is not what they are."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    forms = {(x.shape, x.dtype) for x in tensors}
    if len(values) < 2 or len(tensors) < len(values) or len(forms) != 1 or tensors[0].is_meta:
        return None
    shown = {rank: _elements(value) for rank, value in values.items()}
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, elements in shown.items():
        rows.setdefault(elements, []).append(rank)
    columns = [*zip(*shown.values(), strict=True)]
    ((shape, dtype),) = forms
    return Table(
        f"{tuple(shape)} {str(dtype).removeprefix('torch.')}",
        [(ranks, elements) for elements, ranks in rows.items()],
        [_usual(column) for column in columns],
        max(0, tensors[0].numel() - MAX_COLUMNS),
    )


def _usual(column: Sequence[str]) -> str:
    value, count = Counter(column).most_common(1)[0]
    return value if count > len(column) / 2 else ""


def _elements(tensor: Tensor) -> tuple[str, ...]:
    values = tensor.detach().flatten()[:MAX_COLUMNS].tolist()
    return tuple(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
