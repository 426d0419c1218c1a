"""Layout of reports: tables with a row per call, notes on ranks, and mismatches."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.sim.reporting.errors import Mismatch, MismatchKind
from distlab.util.text import rank_names

WHO = "{who}"  # in a note, stands for the ranks that the note is about


class Row(NamedTuple):
    """One line of a table: ranks, their call, and its place in the program."""

    ranks: tuple[int, ...]
    text: str
    where: str


def place(site: tuple[str, int, str]) -> str:
    """Return a site as ``ring.py:41 in exchange``, or as ``cell 3:2`` outside all functions."""
    file, line, function = site
    if not file:
        return f"in given code ({function})"
    is_cell = file.startswith("cell ") and function == "<module>"
    return f"{Path(file).name}:{line}{'' if is_cell else f' in {function}'}"


def shorten(rows: Sequence[Row], limit: int) -> list[Row]:
    """Return at most ``limit`` rows; if any are cut, the last one lists the ranks not shown."""
    if len(rows) <= limit:
        return list(rows)
    others = tuple(sorted({rank for row in rows[limit - 1 :] for rank in row.ranks}))
    return [*rows[: limit - 1], Row(others, "not shown", "")]


def table(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines of aligned columns."""
    labels = [rank_names(row.ranks) for row in rows]
    label_width = max(map(len, labels), default=0)
    text_width = max((len(row.text) for row in rows if row.where), default=0)
    return [
        f"  {label:<{label_width}}  {row.text:<{text_width}}  {row.where}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]


def place_suffix(site: tuple[str, int, str]) -> str:
    """Return ``, ring.py:41 in exchange``, or "" if no line of the program is known."""
    return f", {place(site)}" if site[0] else ""


def error_line(error: BaseException) -> str:
    """Return the first line of an error, such as ``KeyError: 'x'``, without a full stop."""
    try:
        text = str(error).strip()
    except Exception:  # __str__ is the program's code, and may fail
        text = "it cannot be printed"
    return f"{type(error).__name__}: {text}".splitlines()[0].rstrip(".: ")


def merged_notes(notes: Iterable[tuple[int, str]], limit: int = 4) -> list[str]:
    """Merge notes with the same text, and replace ``WHO`` with the ranks that a note is about."""
    ranks: dict[str, list[int]] = {}
    for rank, text in notes:
        ranks.setdefault(text, []).append(rank)
    merged = [text.replace(WHO, rank_names({*who})) for text, who in ranks.items()]
    if len(merged) <= limit:
        return merged
    return [*merged[:limit], f"… and {len(merged) - limit} more."]


def mismatch(kind: MismatchKind, headline: str, rows: Sequence[Row], advice: str) -> Mismatch:
    """Return the error for calls that do not match."""
    message = "\n".join([f"{kind}: {headline}", *table([*dict.fromkeys(rows)]), advice])
    return Mismatch(message, sorted({rank for row in rows for rank in row.ranks}), kind, advice)
