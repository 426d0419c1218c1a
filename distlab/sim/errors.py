"""What can go wrong inside a simulated world.

SimulationError
├── RankError     a rank's function raised; the first one ends the world
├── Mismatch      two ranks called the same collective, or send and recv, differently
├── Deadlock      every rank that has not finished waits for another: found at once
└── NotSimulated  the program used something the simulated world does not have
"""

from collections.abc import Sequence
from dataclasses import dataclass


class SimulationError(RuntimeError):
    """A simulated world that did not end well.

    Attributes:
        ranks: the ranks to blame, in order; empty where no single ones are.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.ranks))


class RankError(SimulationError):
    """The function of a rank raised an exception; the message holds its traceback."""

    def __init__(self, message: str, ranks: Sequence[int] = (), exception: str = "") -> None:
        super().__init__(message, ranks)
        self.exception = exception  # the name of its type

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.ranks, self.exception))


class Mismatch(SimulationError):
    """Ranks disagree on an operation: its kind, its order, a shape, a dtype, a root."""


@dataclass(frozen=True)
class BlockedCall:
    """The call in which a rank waits."""

    rank: int
    operation: str  # "recv", "all_reduce"
    waits_for: tuple[int, ...]  # global ranks
    where: str  # "ring.py:41 in exchange"
    text: str  # "recv from rank 2, (4,) float32, tag 0"


class Deadlock(SimulationError):
    """No rank can ever go on.

    Attributes:
        kind: "cycle", "missing rank", "order", "peer ended".
        calls: the call in which each blocked rank waits.
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        kind: str = "",
        calls: Sequence[BlockedCall] = (),
    ) -> None:
        super().__init__(message, ranks)
        self.kind = kind
        self.calls = tuple(calls)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.ranks, self.kind, self.calls))


class NotSimulated(SimulationError):
    """The program used a feature that the simulated world does not have."""
