"""Ranks that have shown the same, folded into one; and values side by side.

ranks 0-7: hello               what all have printed
(2,) float32                   tensors of one shape, side by side
  ranks 0-6   28   1
  rank 7      27*  1           unlike most
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from distlab.notebook.output import RankOutput

MAX_ROWS = 16  # ranks that a table shows
GROUPINGS = ("equal", "engine", "type")


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


def folded(outputs: Mapping[int, RankOutput], *, with_equals: bool) -> list[Fold]:
    """Return the ranks that have shown anything, in order of ranks.

    Args:
        outputs: Output of each rank.
        with_equals: True to put ranks together that have shown the same.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank, output in sorted(outputs.items()):
        if not output.is_empty:
            key = output.key() if with_equals else rank
            groups.setdefault(key, []).append(rank)
    return [Fold(ranks, outputs[ranks[0]]) for ranks in groups.values()]


def table(outputs: Mapping[int, RankOutput]) -> Table | None:
    """Return tensors of one shape, side by side; None if the values are not that."""
    elements = {rank: output.elements for rank, output in outputs.items() if output.value}
    tensors = [*filter(None, elements.values())]
    if len(tensors) < 2 or len(tensors) < len(elements) or len({x.kind for x in tensors}) != 1:
        return None
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, tensor in zip(elements, tensors, strict=True):
        rows.setdefault(tensor.texts, []).append(rank)
    columns = zip(*(tensor.texts for tensor in tensors), strict=True)
    return Table(
        tensors[0].kind,
        [(ranks, texts) for texts, ranks in rows.items()],
        [_usual(column) for column in columns],
        tensors[0].num_hidden,
    )


def _usual(column: Sequence[str]) -> str:
    value, count = Counter(column).most_common(1)[0]
    return value if count > len(column) / 2 else ""
