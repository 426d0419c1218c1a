"""What a session shows on a terminal: lines that wrap at words, a verdict that stays in sight."""

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

CUT = "… (all of it again: save)"
LIST = ("- ", "* ", "|", "    ", "```")  # how lines begin that are not to be joined


class Screen:
    """A terminal of some size, by columns and lines."""

    def __init__(
        self,
        say: Callable[[Iterable[str]], None],
        clear: Callable[[], None],
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._say, self._clear, self._size = say, clear, size

    def show(self, lines: Iterable[str]) -> None:
        """Print lines, all of them, on an empty screen."""
        self._clear()
        self.add(lines)

    def add(self, lines: Iterable[str]) -> None:
        """Print lines below the others."""
        self._say(wrapped(lines, self._size()[0]))

    def show_below(self, verdict: Iterable[str], answer: Iterable[str]) -> None:
        """Print an answer below a verdict, of which as much stays as there is room for."""
        self._clear()
        self._say(fitted(verdict, answer, *self._size()))


def wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Break lines between words; what follows an indented line is indented by two columns more."""
    return [part for line in lines for part in _wrapped(line, width)]


def _wrapped(line: str, width: int) -> Sequence[str]:
    if len(line) <= width:
        return (line,)
    indent = line[: len(line) - len(line.lstrip())]
    indent += "  " if indent else ""
    return textwrap.wrap(
        line, width, subsequent_indent=indent, replace_whitespace=False, break_on_hyphens=False
    )


def fitted(verdict: Iterable[str], answer: Iterable[str], width: int, height: int) -> list[str]:
    """Return both, wrapped; the verdict without its end where they are higher than the screen."""
    top, below = wrapped(verdict, width), wrapped(answer, width)
    room = height - 1 - len(below)  # the cursor has the last line
    return [*(top if len(top) <= room else [*top[: max(room - 1, 1)], CUT]), *below]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, a line each: they are wrapped for another width."""
    for place, paragraph in enumerate(text.split("\n\n")):
        lines = paragraph.splitlines()
        yield from [""] * bool(place)
        is_plain = not any(line.startswith(LIST) for line in lines)
        yield from [" ".join(lines)] if is_plain else lines
