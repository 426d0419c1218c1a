"""What a rank prints and shows while a cell runs on it."""

import contextlib
import io
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_CHARS = 200_000  # of a rank's text; what it prints beyond that is dropped


class Screen(io.TextIOBase):
    """A stream of a rank, which keeps what a terminal would show.

    A carriage return begins the line again, as progress bars do.
    """

    encoding = "utf-8"

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._last, self._begins_again = "", False
        self._num_chars = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Add text."""
        self._num_chars += len(text)
        if self._num_chars <= MAX_CHARS:
            first, *rest = text.split("\n")
            self._add(first)
            for line in rest:
                self._lines.append(self._last)
                self._last, self._begins_again = "", False
                self._add(line)
        return len(text)

    def _add(self, text: str) -> None:
        for number, part in enumerate(text.split("\r")):
            if number:
                self._begins_again = True
            if part:
                kept = self._last[len(part) :] if self._begins_again else self._last
                self._last = part + kept if self._begins_again else kept + part
                self._begins_again = False

    def text(self) -> str:
        """Return what is shown now."""
        dropped = f"… and {self._num_chars - MAX_CHARS:,} characters more"
        more = [dropped] * (self._num_chars > MAX_CHARS)
        return "\n".join([*self._lines, self._last, *more])


@dataclass
class RankOutput:
    """What a cell has shown on one rank.

    Attributes:
        screen: Text that the rank has printed.
        shown: Representations, by MIME type, of what it passed to ``display``.
        value: Value of the cell's last expression, or None.
    """

    screen: Screen = field(default_factory=Screen)
    shown: list[Mapping[str, Any]] = field(default_factory=list)
    value: Any = None

    @property
    def is_empty(self) -> bool:
        """True if the rank has shown nothing."""
        return not (self.shown or self.value is not None or self.screen.text())

    def key(self, *, has_value: bool) -> Hashable:
        """Return what is equal on ranks that have shown the same, with or without the value."""
        shown = tuple(str(sorted(data.items())) for data in self.shown)
        return self.screen.text(), shown, repr(self.value) if has_value else ""


_thread = threading.local()  # its `output`, where a cell runs


def output_of_thread() -> RankOutput | None:
    """Return where the calling thread shows things; None if no cell runs in it."""
    output: RankOutput | None = getattr(_thread, "output", None)
    return output


@contextlib.contextmanager
def shown_in(output: RankOutput) -> Iterator[None]:
    """Let what the calling thread prints and displays go into an output."""
    _thread.output = output
    streams = contextlib.redirect_stdout(output.screen), contextlib.redirect_stderr(output.screen)
    try:
        with streams[0], streams[1]:
            yield
    finally:
        _thread.output = None
