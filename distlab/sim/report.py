"""How reports are written: ranks in words, one row per call, two calls that disagree."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.sim.errors import Mismatch, MismatchKind

MAX_RUNS = 6


class Row(NamedTuple):
    """One line of a table: who, what, where in the program."""

    ranks: tuple[int, ...]
    text: str
    where: str


def rank_names(ranks: Iterable[int]) -> str:
    """Write ``rank 3``, ``ranks 0-5 and 9``, or ``ranks 0, 2, 4, …, 254 (128 ranks)``."""
    return _rank_names(tuple(sorted(ranks)))


@functools.lru_cache
def _rank_names(ordered: tuple[int, ...]) -> str:
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs = list(_runs(ordered))
    if len(runs) > MAX_RUNS:
        return f"ranks {', '.join(runs[:3])}, …, {runs[-1]} ({len(ordered)} ranks)"
    return f"ranks {' and '.join(filter(None, [', '.join(runs[:-1]), runs[-1]]))}"


def place(site: tuple[str, int, str]) -> str:
    """Write ``ring.py:41 in exchange``."""
    file, line, function = site
    if not file:
        return f"in given code ({function})"
    return f"{Path(file).name}:{line} in {function}"


def verb(subjects: Sequence[object], plural: str, singular: str = "") -> str:
    """Return ``wait`` for several ranks, ``waits`` (or ``singular``) for one."""
    return plural if len(subjects) > 1 else singular or f"{plural}s"


def join(clauses: Sequence[str]) -> str:
    """Write ``a``, ``a, and b`` or ``a, b, and c``."""
    return ", and ".join(filter(None, [", ".join(clauses[:-1]), clauses[-1]]))


def shorten(rows: Sequence[Row], limit: int) -> list[Row]:
    """Keep the first rows of too many, and say whose are left out."""
    if len(rows) <= limit:
        return list(rows)
    others = tuple(sorted({rank for row in rows[limit - 1 :] for rank in row.ranks}))
    return [*rows[: limit - 1], Row(others, "not shown", "")]


def table(rows: Sequence[Row]) -> list[str]:
    """Write rows in columns."""
    labels = [rank_names(row.ranks) for row in rows]
    label_width = max(map(len, labels), default=0)
    text_width = max((len(row.text) for row in rows if row.where), default=0)
    return [
        f"  {label:<{label_width}}  {row.text:<{text_width}}  {row.where}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]


def mismatch(kind: MismatchKind, headline: str, rows: Sequence[Row], advice: str) -> Mismatch:
    """Make the error for calls that cannot belong together."""
    message = "\n".join([f"{kind}: {headline}", *table([*dict.fromkeys(rows)]), advice])
    return Mismatch(message, sorted({rank for row in rows for rank in row.ranks}), kind)


def _runs(ordered: Sequence[int]) -> Iterator[str]:
    """Yield ``0-5`` for consecutive numbers, ``7`` for a single one."""
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            first, last = ordered[start], ordered[end - 1]
            if last - first < 2:
                yield from map(str, ordered[start:end])
            else:
                yield f"{first}-{last}"
            start = end
