"""Standard error and what becomes of a stream that nobody reads."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

INTERRUPTED = 130  # the exit code of ctrl-C


def complain(message: str, code: int) -> int:
    """Print a line on standard error; return the exit code that was given.

    All ranks of mpirun meet the same: one of each machine prints it.
    """
    from distlab.launch.launchers import speaks_for_its_machine  # rarely needed

    if speaks_for_its_machine():
        print_line(message)
    return code


def print_line(message: str) -> None:
    """Print a line on standard error, or nothing where nobody reads that."""
    erase_bar = "\r\x1b[K" if sys.stderr.isatty() else ""  # a progress bar may stand there
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
    """Let whatever is printed on standard error be noticed."""
    watched = Watched(sys.stderr)
    with redirect_stderr(watched):
        yield watched


def drop(number: int) -> None:
    """Let what Python still wants to write to a stream go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
