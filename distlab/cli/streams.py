"""Writing to standard error, and handling streams that are no longer read."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

INTERRUPTED = 130  # exit code after ctrl-C


def complain(message: str, code: int) -> int:
    """Print a line on standard error; return the given exit code.

    Under mpirun, every rank raises the same error, so only one rank per machine prints it.
    """
    from distlab.launch.launchers import speaks_for_its_machine  # slow import, rarely needed

    if speaks_for_its_machine():
        print_line(message)
    return code


def print_line(message: str) -> None:
    """Print a line on standard error; do nothing if that stream is no longer read."""
    erase_bar = "\r\x1b[K" if sys.stderr.isatty() else ""  # there may be a progress bar
    try:
        print(erase_bar + message, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr.fileno())


class Watched:
    """A stream that remembers whether anything was written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.has_text = stream, False

    def write(self, text: str) -> int:
        self.has_text = True
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watched_stderr() -> Iterator[Watched]:
    """Route standard error through a ``Watched`` stream inside the block, and yield the stream."""
    watched = Watched(sys.stderr)
    with redirect_stderr(watched):
        yield watched


def drop(number: int) -> None:
    """Discard everything written to a stream from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
