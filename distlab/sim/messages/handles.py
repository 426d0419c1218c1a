"""Handles that were never waited for. Until then, the program must not use the tensor.

Whether the bytes have arrived does not matter: on another day or network, they may not have.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from distlab.sim.messages.pending import Pending
from distlab.sim.reporting.report import Row
from distlab.util.text import joined, rank_names

MAX_NOTES = 2


class Handles:
    """The operations for which nobody has called ``wait()`` yet.

    Attributes:
        open: these operations, in the order of the calls.
    """

    def __init__(self) -> None:
        self.open: dict[Pending, None] = {}  # plain: every operation enters and leaves

    def rows(self, ranks: Iterable[int]) -> list[Row]:
        """Return a row for each of these ranks' handles, by rank; equal ones are counted.

        Handles that torch keeps to itself, as in DistributedDataParallel, are left out.
        """
        wanted = set(ranks)
        mine = (p for p in self.open if p.rank in wanted and not p.is_by_torch)
        counts = Counter(_row(pending) for pending in mine)
        rows = [_counted(row, count) for row, count in counts.items()]
        return sorted(rows, key=lambda row: row.ranks)

    def note_of_failed(self, rank: int) -> str:
        """Say what a rank that has failed did not wait for; "" if nothing."""
        told = [f"{row.text} ({row.where})" for row in self.rows([rank])[:MAX_NOTES]]
        return f"Rank {rank} had not waited for its {joined(told)}." if told else ""

    def notes(self, returned: Iterable[int]) -> Iterator[str]:
        """Say what ranks that have returned did not wait for, the first few."""
        for row in self.rows(returned)[:MAX_NOTES]:
            who = rank_names(row.ranks).capitalize()
            yield f"{who} returned without waiting for its {row.text} ({row.where})."


def _row(pending: Pending) -> Row:
    """Return the line of a report; a message that was not waited for came from an async call."""
    letter = "i" if pending.kind in ("send", "recv") else ""
    return Row((pending.rank,), f"{letter}{pending.text()}", pending.where())


def _counted(row: Row, count: int) -> Row:
    return row if count == 1 else row._replace(text=f"{row.text} ({count} times)")
