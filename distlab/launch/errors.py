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


@dataclass(frozen=True)
class RankFate:
    """What became of one rank, as the parent saw it."""

    rank: int
    what: str  # "raised ValueError: …", "returned", "was stopped while it waited in recv at …"
    output: str  # the tail of what it printed


class LaunchError(RuntimeError):
    """A world that did not end well.

    Attributes:
        rank: the rank that is to blame, or None where no single one is.
        fates: what became of every rank; empty if none was started.
        exception: the name of the type that ``fn`` raised on ``rank``, if it did.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        fates: Sequence[RankFate] = (),
        exception: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.fates = tuple(fates)
        self.exception = exception


class SetupError(LaunchError):
    """The world could not be started; the message says what to change."""


class RankFailed(LaunchError):
    """``fn`` raised an exception on ``rank``; the message holds its traceback."""


class RankExited(LaunchError):
    """``rank`` ended without a result, or returned while other ranks still waited for it."""


class RankCrashed(LaunchError):
    """A signal ended ``rank``."""


class RankOutOfMemory(LaunchError):
    """``rank`` could not allocate, or grew beyond the limit and was stopped."""


class RankHung(LaunchError):
    """Time is up; the message says where every rank is. ``rank`` is the one that does not wait."""
