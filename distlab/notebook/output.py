"""What a rank prints and shows while a cell runs on it."""

import contextlib
import io
import re
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from IPython.core.formatters import DisplayFormatter
from torch import Tensor

from distlab.notebook.cells import without_shell

MAX_CHARS = 200_000  # of a rank's lines; what it prints beyond that is dropped
UP = "\x1b[A"
_MOVES = re.compile(r"(\n|\r|\x1b\[A)")
MAX_ELEMENTS = 12  # of a tensor in a table
WIDGET = "application/vnd.jupyter.widget-view+json"

Bundle = Mapping[str, Any]  # representations by MIME type

_format = DisplayFormatter()


class Screen:
    """What a terminal would show of a rank's text.

    A carriage return begins the line again, as progress bars do; those with other bars below them
    also go a line up.
    """

    def __init__(self) -> None:
        self._lines, self._row, self._begins_again = [""], 0, False
        self._num_kept = self._num_dropped = 0  # characters of ended lines

    def write(self, text: str) -> int:
        """Add text; what UTF-8 cannot encode is kept as an escape, as no notebook could show it."""
        text = text.encode(errors="backslashreplace").decode()
        for part in _MOVES.split(text):
            if part == "\n":
                self._go_down()
            elif part == "\r":
                self._begins_again = True
            elif part == UP:
                self._row = max(0, self._row - 1)
            elif part:
                self._add(part)
        return len(text)

    def _go_down(self) -> None:
        num_chars = len(self._lines[self._row]) + 1
        if self._row + 1 < len(self._lines):
            self._row += 1
        else:
            kept = min(num_chars, MAX_CHARS - self._num_kept)
            self._num_kept += kept
            self._num_dropped += num_chars - kept
            self._lines[self._row :] = [self._lines[self._row][:kept], *[""] * bool(kept)]
            self._row = len(self._lines) - 1
        self._begins_again = False

    def _add(self, text: str) -> None:
        line = self._lines[self._row]
        self._lines[self._row] = text + line[len(text) :] if self._begins_again else line + text
        self._begins_again = False

    def text(self) -> str:
        """Return what is shown now."""
        dropped = [f"… {self._num_dropped:,} more characters …"] * bool(self._num_dropped)
        return "\n".join([*self._lines[:-1], *dropped, self._lines[-1][:MAX_CHARS]])


class Elements(NamedTuple):
    """The first elements of a tensor.

    Attributes:
        kind: Shape and dtype, such as ``(2, 3) float32``.
        texts: First elements as text.
        num_hidden: Number of the others.
    """

    kind: str
    texts: tuple[str, ...]
    num_hidden: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Elements":
        """Read the elements, as printing them would; if the tensor is on a GPU, the host waits."""
        part = tensor.detach()[:MAX_ELEMENTS] if tensor.dim() else tensor.detach()
        while part.dim() > 1 and len(part) and part[0].numel() >= MAX_ELEMENTS:
            part = part[0][:MAX_ELEMENTS]  # flattening all of a tensor may copy it
        elements = part.flatten()[:MAX_ELEMENTS].tolist()
        texts = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in elements)
        dtype = str(tensor.dtype).removeprefix("torch.")
        hidden = max(0, tensor.numel() - MAX_ELEMENTS)
        return cls(f"{tuple(tensor.shape)} {dtype}", tuple(texts), hidden)


def _has_elements(tensor: Tensor) -> bool:
    """Return whether a tensor stores each of its elements, as a plain number."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not tensor.is_quantized and not tensor.is_meta


@dataclass
class RankOutput:
    """What a cell has shown on one rank.

    Attributes:
        screen: Text that the rank has printed.
        shown: Representations, by MIME type, of what it passed to ``display``.
        value: Representations of the value of the cell's last expression; empty for None.
        elements: First elements of that value if it is a tensor.
    """

    screen: Screen = field(default_factory=Screen)
    shown: list[Bundle] = field(default_factory=list)
    value: Bundle = field(default_factory=dict)
    elements: Elements | None = None
    _places: dict[str, int] = field(default_factory=dict)  # in `shown`, by display id

    def keep(self, value: Any) -> None:
        """Keep how a value is shown; the value itself may be unable to leave its process."""
        if value is not None:
            self.value = _format.format(value)[0]
        if isinstance(value, Tensor) and _has_elements(value):
            self.elements = Elements.of(value)

    def show(self, data: Bundle, display_id: str = "") -> None:
        """Add a representation, or replace the one with the same display id."""
        place = self._places.get(display_id, len(self.shown))
        self.shown[place : place + 1] = [data]
        if display_id:
            self._places[display_id] = place

    def clear(self) -> None:
        """Remove all that was printed and displayed, as ``clear_output`` does."""
        self.screen, self.shown, self._places = Screen(), [], {}

    @property
    def is_empty(self) -> bool:
        """True if the rank has shown nothing."""
        return not (self.bundles or self.text)

    @property
    def text(self) -> str:
        """What the rank has printed, without empty lines at the end."""
        return self.screen.text().rstrip("\n")

    @property
    def bundles(self) -> list[Bundle]:
        """What the rank has displayed, and the value if there is one."""
        return [*self.shown, *filter(None, [self.value])]

    def by_type(self) -> "tuple[RankOutput, RankOutput, RankOutput]":
        """Return the printed text, what was displayed, and the value, each alone."""
        return (
            RankOutput(screen=self.screen),
            RankOutput(shown=self.shown),
            RankOutput(value=self.value, elements=self.elements),
        )

    def without_value(self) -> "RankOutput":
        """Return what was printed and displayed alone."""
        return RankOutput(screen=self.screen, shown=self.shown)

    def key(self) -> Hashable:
        """Return what is equal on ranks that have shown the same."""
        return self.text, tuple(str(sorted(data.items())) for data in self.bundles)


_thread = threading.local()  # its `output`, where a cell runs


def output_of_thread() -> RankOutput | None:
    """Return where the calling thread shows things; None if no cell runs in it."""
    output: RankOutput | None = getattr(_thread, "output", None)
    return output


class _Printed(io.TextIOBase):
    """A stream that prints in the output of the calling thread.

    Who keeps it after its cell, such as a handler of `logging`, prints in the output of later cells
    or, in a thread of the notebook, as that does.
    """

    encoding = "utf-8"

    def __init__(self, output: RankOutput) -> None:
        self.output: RankOutput | None = output  # of threads that the rank has started

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Print text."""
        output = output_of_thread() or self.output
        return output.screen.write(text) if output else sys.stderr.write(text)


@contextlib.contextmanager
def shown_in(output: RankOutput) -> Iterator[None]:
    """Let what the calling thread prints and displays go into an output."""
    _thread.output, printed = output, _Printed(output)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        _thread.output = printed.output = None


def route_displays(shell: Any) -> Callable[[], None]:
    """Let what a rank passes to ``display`` go into its output; return a function that undoes it.

    So does the error of a value that cannot be shown, such as an exception in its ``__repr__``.

    Args:
        shell: IPython's shell.
    """
    publisher = shell.display_pub
    publish, clear, show_error = publisher.publish, publisher.clear_output, shell.showtraceback

    def publish_by_rank(data: dict[str, Any], *args: Any, **options: Any) -> None:
        output = output_of_thread()
        if output is None or WIDGET in data:  # a widget shows itself, while the cell runs
            publish(data, *args, **options)
        else:
            output.show(data, (options.get("transient") or {}).get("display_id", ""))

    def clear_by_rank(*args: Any, **options: Any) -> None:
        output = output_of_thread()
        if output is None:
            clear(*args, **options)
        else:
            output.clear()

    def undo() -> None:
        publisher.publish, publisher.clear_output = publish, clear
        shell.showtraceback = show_error

    publisher.publish, publisher.clear_output = publish_by_rank, clear_by_rank
    shell.showtraceback = _by_rank(show_error)
    return undo


def _by_rank(show_error: Callable[..., None]) -> Callable[..., None]:
    """Let a rank print the error that it is handling, where a shell would show it."""

    def show_error_by_rank(*args: Any, **options: Any) -> None:
        output, error = output_of_thread(), sys.exc_info()[1]
        if output is None or error is None:
            show_error(*args, **options)
        else:
            output.screen.write("".join(traceback.format_exception(without_shell(error))))

    return show_error_by_rank
