"""Output of a session on a terminal: lines wrapped at words, and a verdict that stays visible."""

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

CUT = "… (all of it again: save)"
LIST = ("- ", "* ", "|", "    ", "```")  # beginnings of lines that must not be joined


class Screen:
    """A terminal with a size in columns and lines."""

    def __init__(
        self,
        say: Callable[[Iterable[str]], None],
        clear: Callable[[], None],
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._say, self._clear, self._size = say, clear, size

    def show(self, lines: Iterable[str]) -> None:
        """Clear the screen and print lines."""
        self._clear()
        self.add(lines)

    def add(self, lines: Iterable[str]) -> None:
        """Print lines below the present ones."""
        self._say(wrapped(lines, self._size()[0]))

    def show_below(self, verdict: Iterable[str], answer: Iterable[str]) -> None:
        """Print an answer below as much of a verdict as there is room for."""
        self._clear()
        self._say(fitted(verdict, answer, *self._size()))


def wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Break lines between words; continuations of an indented line get two more columns."""
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
    """Return verdict and answer, wrapped; the verdict is cut if they do not fit the screen."""
    top, below = wrapped(verdict, width), wrapped(answer, width)
    room = height - 1 - len(below)  # the cursor has the last line
    return [*(top if len(top) <= room else [*top[: max(room - 1, 1)], CUT]), *below]


def paragraphs(text: str) -> Iterator[str]:
    """Yield each paragraph of a text as one line, because it was wrapped for another width."""
    for place, paragraph in enumerate(text.split("\n\n")):
        lines = paragraph.splitlines()
        yield from [""] * bool(place)
        is_plain = not any(line.startswith(LIST) for line in lines)
        yield from [" ".join(lines)] if is_plain else lines
