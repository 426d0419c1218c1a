"""Copy the output of ranks from their descriptors to the screen, without mixing their lines."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping

from distlab.launch.limits import crowd, num_cores

LAST_BYTES, LAST_LINES = 4096, 10
QUIET_S = 1.0  # no status line is shown if the world is up within this time
REDRAW_S = 0.2


@contextlib.contextmanager
def channel() -> Iterator[tuple[int, int]]:
    """Open a pipe for a rank's output; if stdout is a terminal, open a pseudo-terminal instead.

    Programs show progress bars only on a terminal. The write end is closed afterwards, because the
    rank has its own copy.
    """
    is_terminal = _is_open() and sys.stdout.isatty()
    reading, writing = os.openpty() if is_terminal else os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(writing)


def split_at_line_end(data: bytes) -> tuple[bytes, bytes]:
    """Split output into whole lines, which can be shown now, and the start of the next line."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], data[end:]


def show(data: bytes) -> None:
    """Print to stdout, replacing characters that its encoding does not support."""
    if not data or not _is_open():
        return
    text = data.decode(errors="replace").replace("\r\n", "\n")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


class Screen:
    """Shows the output of one world up to a limit; beyond it, only each rank's last lines."""

    def __init__(self, max_bytes: int | None) -> None:
        """Show up to ``max_bytes`` of output, or all of it if ``max_bytes`` is None."""
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def show(self, data: bytes) -> None:
        """Print the data, up to the limit."""
        before = self._num_bytes
        self._num_bytes += len(data)
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            show(data)
        else:
            show(split_at_line_end(data[: max(0, self._max_bytes - before)])[0])

    def close(self, tails: Mapping[int, bytes]) -> None:
        """If output was cut, say how much there was and show the last lines of each rank."""
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            return
        show(f"[of {self._num_bytes:,} bytes of output, the rest is not shown]\n".encode())
        for rank, tail in tails.items():
            last = tail[-LAST_BYTES:].rpartition(b"\n")[0].split(b"\n")[-LAST_LINES:]
            text = b"\n".join([b"[the last lines of process %d:]" % rank, *last])
            show(text + b"\n")


def _is_open() -> bool:
    """Return True if stdout is open; some programs have no stdout, and some close it."""
    return sys.stdout is not None and not sys.stdout.closed


class Display:
    """A line on the terminal that shows how many ranks have joined, and is erased when all have."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._is_on = sys.stderr is not None and sys.stderr.isatty()
        self._next_draw = time.monotonic() + QUIET_S
        self._has_drawn = False
        if self._is_on and (warning := crowd(world_size, num_cores())):
            self._write(f"{warning}\n")

    def show(self, num_forked: int, num_joined: int) -> None:
        """Redraw the line, at most a few times a second."""
        now = time.monotonic()
        if not self._is_on or now < self._next_draw:
            return
        self._next_draw, self._has_drawn = now + REDRAW_S, True
        self._write(
            f"\r\x1b[Kstarting {self._world_size} ranks: {num_forked} have a process, "
            f"{num_joined} have joined the group"
        )

    def close(self) -> None:
        """Erase the line and draw nothing more."""
        if self._has_drawn:
            self._write("\r\x1b[K")
        self._is_on = self._has_drawn = False

    def _write(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)
