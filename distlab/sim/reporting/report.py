"""Layout of reports: tables with a row per call, notes on ranks, and mismatches."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.sim.reporting.errors import Mismatch, MismatchKind
from distlab.util.text import rank_names

WHO = "{who}"  # placeholder in a note for the ranks that it is about


class Row(NamedTuple):
    """One line of a table: ranks, their call, and its place in the program."""

    ranks: tuple[int, ...]
    text: str
    where: str


def place(site: tuple[str, int, str]) -> str:
    """Write ``ring.py:41 in exchange``."""
    file, line, function = site
    if not file:
        return f"in given code ({function})"
    return f"{Path(file).name}:{line} in {function}"


def shorten(rows: Sequence[Row], limit: int) -> list[Row]:
    """Cut rows down to ``limit``; the last one then names the ranks that are not shown."""
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


def place_suffix(site: tuple[str, int, str]) -> str:
    """Write ``, ring.py:41 in exchange``, or nothing if no line of the program is known."""
    return f", {place(site)}" if site[0] else ""


def error_line(error: BaseException) -> str:
    """Write ``KeyError: 'x'``: the first line of an error, without a full stop."""
    try:
        text = str(error).strip()
    except Exception:  # __str__ is the program's, and may fail
        text = "it cannot be printed"
    return f"{type(error).__name__}: {text}".splitlines()[0].rstrip(".: ")


def merged_notes(notes: Iterable[tuple[int, str]], limit: int = 4) -> list[str]:
    """Write notes on ranks, merging those with the same text; ``WHO`` becomes their ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in notes:
        ranks.setdefault(text, []).append(rank)
    merged = [text.replace(WHO, rank_names({*who})) for text, who in ranks.items()]
    if len(merged) <= limit:
        return merged
    return [*merged[:limit], f"… and {len(merged) - limit} more."]


def mismatch(kind: MismatchKind, headline: str, rows: Sequence[Row], advice: str) -> Mismatch:
    """Make the error for calls that cannot belong together."""
    message = "\n".join([f"{kind}: {headline}", *table([*dict.fromkeys(rows)]), advice])
    return Mismatch(message, sorted({rank for row in rows for rank in row.ranks}), kind, advice)
