"""Everything that ``run`` and ``simulate`` can raise.

    LaunchError
    ├── SetupError        the world could not be started: arguments, platform, devices
    ├── RankFailed        fn raised an exception on a rank
    ├── RankExited        a rank ended, or returned, while others still needed it
    ├── RankCrashed       a signal ended a rank: segmentation fault, abort, kill
    ├── RankOutOfMemory   a rank ran out of memory, or exceeded the limit
    └── RankHung          time is up and a rank has not finished

The first line of a message is the verdict; the evidence follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RankFate:
    """How one rank ended, as the parent saw it."""

    rank: int
    what: str  # such as "raised ValueError: …" or "stopped while waiting in recv at …"
    output: str  # the end of the rank's output


class LaunchError(RuntimeError):
    """Base class of all errors that ``run`` and ``simulate`` raise.

    Attributes:
        kind: Kind of failure in a word or two, for use by programs; each class has a default.
        rank: Rank that is to blame, or None if no single rank is.
        fates: Fate of every rank; empty if no rank was started, or if the world is simulated.
        exception: Type name of the exception that ``fn`` raised on ``rank``, or "".
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
    """``rank`` ended without a result, or returned while others still waited for it.

    The ``kind`` is "left" or "returned", respectively.
    """

    KIND = "left"


class RankCrashed(LaunchError):
    """A signal ended ``rank``."""

    KIND = "signal"


class RankOutOfMemory(LaunchError):
    """``rank`` could not allocate memory, or was stopped because it exceeded the limit."""

    KIND = "memory"


class RankHung(LaunchError):
    """The world did not end in time; the message says where every rank is.

    The ``kind`` is one of these:

        deadlock       certain, because a simulation found it, perhaps in a rerun of the program
        all wait       on real processes, no rank is computing
        endless loop   ``rank`` is still computing, at a line of ``fn``
        blocked        a line of ``fn`` waits for something other than communication, such as a
                       lock (detected on Linux only)
        suspended      a rank was stopped by SIGSTOP
        time is up     no line of ``fn`` is to blame; the machine may be slow
    """

    KIND = "time is up"
