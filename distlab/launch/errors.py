"""Everything ``run`` can raise.

    LaunchError
    ├── SetupError        the world could not be started: arguments, platform, devices
    ├── RankFailed        fn raised an exception on a rank
    ├── RankExited        a rank ended, or returned, while others still needed it
    ├── RankCrashed       a signal ended a rank: segmentation fault, abort, kill
    ├── RankOutOfMemory   a rank ran out of memory, or into the limit
    └── RankHung          time is up and a rank has not finished

The first line of a message is the verdict; what supports it follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RankFate:
    """The end of one rank, as the parent saw it."""

    rank: int
    what: str  # "raised ValueError: …", "returned", "was stopped while it waited in recv at …"
    output: str  # the tail of what it printed


class LaunchError(RuntimeError):
    """A world that did not end well.

    Attributes:
        kind: Kind of failure in a word or two, for programs; each class names its own.
        rank: Rank that is to blame, or None if no single rank is.
        fates: End of every rank; empty if none was started.
        exception: Name of the type that ``fn`` raised on ``rank``, or "".
        advice: Part of the message that says what to look for, or "".
    """

    KIND: ClassVar[str] = "unknown"

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        rank: int | None = None,
        fates: Sequence[RankFate] = (),
        exception: str = "",
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind or self.KIND
        self.rank = rank
        self.fates = tuple(fates)
        self.exception = exception
        self.advice = advice


class SetupError(LaunchError):
    """The world could not be started; the message says what to change."""

    KIND = "set-up"


class RankFailed(LaunchError):
    """``fn`` raised an exception on ``rank``; the message holds its traceback."""

    KIND = "exception"


class RankExited(LaunchError):
    """``rank`` ended without a result ("left"), or while others waited for it ("returned")."""

    KIND = "left"


class RankCrashed(LaunchError):
    """A signal ended ``rank``."""

    KIND = "signal"


class RankOutOfMemory(LaunchError):
    """``rank`` could not allocate, or grew beyond the limit and was stopped."""

    KIND = "memory"


class RankHung(LaunchError):
    """The world does not end; the message says where every rank is.

    ``kind`` is "deadlock" (exact; in the simulated world, or by what the same program does there),
    "all wait" (real processes: none computes), "endless loop" (a line of ``fn`` computes on and on;
    ``rank`` runs it), "blocked" (Linux: a line of ``fn`` waits for what is not communication, a
    lock for example), "suspended" (a rank was stopped by SIGSTOP) or "time is up" (no line of
    ``fn`` is to blame: the machine may be slow).
    """

    KIND = "time is up"
