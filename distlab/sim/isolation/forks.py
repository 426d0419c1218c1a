"""Processes that a rank forks: they end where its program does, as they have no ranks."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

_exit = os._exit


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """End processes that the program forks in this block at the end of the block."""
    parent = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != parent:
            _end(error)
        raise
    if os.getpid() != parent:
        _exit(0)


def _end(error: BaseException) -> NoReturn:
    """End the process with the status that Python would give it."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        _exit(error.code or 0)
    traceback.print_exception(error, file=sys.__stderr__)
    _exit(1)
