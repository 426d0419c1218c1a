"""Ranks as the user names them: ``0,2-3``, or all."""

import re
from collections.abc import Sequence

from distlab.util.text import rank_names, verb


def parse_ranks(text: str, num_ranks: int) -> list[int]:
    """Return the ranks that a text names: numbers, ranges such as ``2-5``, or ``all``.

    Raises:
        ValueError: The text names no ranks, or one that the cluster does not have.
    """
    if text in ("", "all"):
        return [*range(num_ranks)]
    parts = re.split(r"[,\s]+", text.strip())
    ranks = sorted({rank for part in parts for rank in _range(part, text)})
    if missing := [rank for rank in ranks if rank >= num_ranks]:
        wrong = f"there {verb(missing, 'are', 'is')} no {rank_names(missing)}"
        raise ValueError(f"{wrong}: the cluster has {rank_names(range(num_ranks))}")
    return ranks


def _range(part: str, text: str) -> Sequence[int]:
    first, dash, last = part.partition("-")
    is_range = first.isdigit() and (last.isdigit() or not dash)
    ranks = range(int(first), int(last or first) + 1) if is_range else ()
    if not ranks:
        raise ValueError(f"{text!r} names no ranks: write them as 0,2-3, or all")
    return ranks
