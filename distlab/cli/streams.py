"""Standard error and what becomes of a stream that nobody reads."""

import os
import sys

INTERRUPTED = 130  # the exit code of ctrl-C


def complain(message: str, code: int) -> int:
    """Print a line on standard error; return the exit code that was given."""
    erase_bar = "\r\x1b[K" if sys.stderr.isatty() else ""  # a progress bar may stand there
    try:
        print(erase_bar + message, file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr.fileno())
    return code


def drop(number: int) -> None:
    """Let what Python still wants to write to a stream go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
