"""The ranks of a notebook, whatever they are."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distlab.notebook.cells import Cell
from distlab.notebook.output import RankOutput


@dataclass(frozen=True)
class Ran:
    """What a cell did on its ranks.

    Attributes:
        outputs: What each rank has shown, by rank.
        error: Report on the error that ended the cell; "" if there was none.
        notes: Lines on what is wrong though nothing has failed, such as races.
        cost: Time, bytes and messages in one line.
    """

    outputs: Mapping[int, RankOutput]
    error: str = ""
    notes: Collection[str] = field(default_factory=list)
    cost: str = ""


class World(Protocol):
    """Ranks that keep their variables from cell to cell.

    Attributes:
        num_ranks: Number of ranks.
        title: What the ranks are, such as ``8 simulated ranks of dgx-h100``.
    """

    num_ranks: int
    title: str

    def run(self, cell: Cell, ranks: Collection[int]) -> Ran:
        """Run a cell on ranks."""

    def push(self, values: Mapping[str, Any], ranks: Collection[int]) -> None:
        """Give copies of values to ranks, as variables."""

    def pull(self, name: str, ranks: Collection[int]) -> dict[int, Any]:
        """Return copies of a variable's values, by rank.

        Raises:
            NameError: A rank has no such variable.
        """

    def names(self, rank: int) -> Mapping[str, Any]:
        """Return the variables of a rank, or descriptions of them."""

    def state(self) -> list[str]:
        """Return lines on what the ranks hold and what is unfinished."""

    def close(self) -> None:
        """End the ranks."""
