"""Registers programs: on how many ranks they run, and what a rank is expected to get."""

from collections.abc import Callable
from typing import Any

BROKEN: dict[str, Any] = {}
CORRECT: dict[str, Any] = {}


def broken(n: int = 4, raises: str | None = None, timeout: int = 8) -> Callable[[Any], Any]:
    """Register a broken program.

    Args:
        n: ranks.
        raises: the exception that a rank gets and handles; None: a report is expected.
        timeout: seconds that it took at most where it was written.
    """

    def keep(fn: Any) -> Any:
        fn.n, fn.raises, fn.limit = n, raises, timeout
        BROKEN[fn.__name__] = fn
        return fn

    return keep


def correct(n: int = 4, timeout: int = 30) -> Callable[[Any], Any]:
    """Register a correct program, which returns something that can be compared."""

    def keep(fn: Any) -> Any:
        fn.n, fn.limit = n, timeout
        CORRECT[fn.__name__] = fn
        return fn

    return keep
