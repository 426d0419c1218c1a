"""What ranks print: from their descriptors to the screen, without mixing their lines."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def channel() -> Iterator[tuple[int, int]]:
    """A pipe for what a rank prints; a terminal if ours is one, so that progress bars show.

    The writing end is closed afterwards: the rank has a copy.
    """
    is_terminal = _is_open() and sys.stdout.isatty()
    reading, writing = os.openpty() if is_terminal else os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(writing)


def split_at_line_end(data: bytes) -> tuple[bytes, bytes]:
    """Split into what can be shown without cutting a line of one rank by one of another."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], data[end:]


def show(data: bytes) -> None:
    """Print on our own output, with what its encoding does not know replaced."""
    if not data or not _is_open():
        return
    text = data.decode(errors="replace").replace("\r\n", "\n")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def _is_open() -> bool:
    """Whether there is an output: a program without a console has none, others close theirs."""
    return sys.stdout is not None and not sys.stdout.closed
