"""Errors of a simulated world.

SimulationError
├── RankError     a rank's function raised an exception; the first one ends the world
├── Mismatch      ranks disagree on a collective, or on a send and its recv
└── Deadlock      no unfinished rank can continue; detected immediately
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MismatchKind = Literal[
    "operation mismatch",
    "shape or dtype mismatch",
    "buffer changed",  # a buffer was written to before its operation was done (strict mode)
    "never met",  # an operation was posted, but never matched (strict mode)
]
DeadlockKind = Literal[
    "send/recv cycle",  # ranks wait for each other's messages in a circle
    "missing rank",  # a rank waits for a message while others wait for it in a collective
    "order mismatch",  # ranks wait in different collectives, each for the other
    "key never set",  # a rank waits for a key of the store that no rank sets
    "thread wait",  # a rank waits for one of its own locks, queues or threads
    "peer ended",  # a rank waits for another that has returned or was killed
]


class SimulationError(RuntimeError):
    """A simulated world has failed.

    Attributes:
        ranks: Ranks to blame, in order; empty if no particular ranks are to blame.
        advice: Advice that the message contains, or "".
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), advice: str = "") -> None:
        super().__init__(message)
        self.ranks, self.advice = tuple(ranks), advice

    def note(self, causes: Sequence[str], remarks: Sequence[str]) -> None:
        """Insert causes, then "Or else:", before the advice, and append remarks."""
        text = str(self)
        if causes and self.advice:
            before, _, after = text.rpartition(self.advice)
            text = "\n".join(
                [f"{before}{causes[0]}", *causes[1:], f"Or else: {self.advice}{after}"]
            )
        elif causes:
            text = "\n".join([text, *causes])
        self.args = ("\n".join([text, *remarks]),)


EXIT = "os._exit"


class RankError(SimulationError):
    """A rank's function raised an exception; the message contains its traceback."""

    def __init__(self, message: str, ranks: Sequence[int] = (), exception: str = "") -> None:
        super().__init__(message, ranks)
        self.exception = exception  # name of the exception's type, or EXIT


class Mismatch(SimulationError):
    """Ranks disagree on an operation: its kind, order, shape, dtype or root."""

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        kind: MismatchKind = "operation mismatch",
        advice: str = "",
    ) -> None:
        super().__init__(message, ranks, advice)
        self.kind = kind


@dataclass(frozen=True)
class BlockedCall:
    """The call that blocks a rank."""

    rank: int
    operation: str  # such as "recv" or "all_reduce"
    waits_for: tuple[int, ...]  # global ranks
    where: str  # such as "ring.py:41 in exchange"
    text: str  # such as "recv from rank 2, (4,) float32"


class Deadlock(SimulationError):
    """No rank can ever continue.

    Attributes:
        kind: Kind of the cause that the message names first.
        calls: Calls that block ranks, in rank order.
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        kind: DeadlockKind = "send/recv cycle",
        calls: Sequence[BlockedCall] = (),
        advice: str = "",
    ) -> None:
        super().__init__(message, ranks, advice)
        self.kind, self.calls = kind, tuple(calls)
