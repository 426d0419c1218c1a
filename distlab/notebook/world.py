"""The ranks of a notebook, whatever they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from matplotlib.figure import Figure

from distlab.notebook.cells import Cell
from distlab.notebook.output import RankOutput

T = TypeVar("T")


@dataclass(frozen=True)
class Ran:
    """What came of a cell, beside the outputs of its ranks.

    Attributes:
        error: Report on the error that ended the cell; "" if there was none.
        notes: Lines on what is wrong though nothing has failed, such as races.
        cost: Time, bytes and messages in one line.
    """

    error: str = ""
    notes: Sequence[str] = ()
    cost: str = ""


class World(Protocol):
    """Ranks that keep their variables from cell to cell.

    Attributes:
        num_ranks: Number of ranks.
        title: What the ranks are, such as ``8 simulated ranks of dgx-h100``.
    """

    num_ranks: int
    title: str

    def run(self, cell: Cell, outputs: Mapping[int, RankOutput]) -> Ran:
        """Run a cell on the ranks that have an output, and fill the outputs as they go.

        An error, a deadlock or Ctrl-C ends the cell; the ranks keep their variables. Modules of
        the program whose files have changed are reloaded before the cell.
        """

    def push(self, values: Mapping[str, Any]) -> None:
        """Give copies of values to all ranks, as variables."""

    def pull(self, name: str) -> list[Any]:
        """Return copies of a variable's values on all ranks.

        Raises:
            NameError: A rank has no such variable.
        """

    def ask(self, ranks: Sequence[int], question: Callable[..., T], *args: Any) -> list[T]:
        """Call a function with the variables of each rank and with arguments.

        Raises:
            NameError: The function raised this.
        """

    def state(self) -> list[str]:
        """Return lines on what the ranks hold and what is unfinished."""

    def lanes(self) -> Figure:
        """Draw what the ranks did in the last cell over time.

        Raises:
            ValueError: There is nothing to draw.
        """

    def close(self) -> None:
        """End the ranks."""
