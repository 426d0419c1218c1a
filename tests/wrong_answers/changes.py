"""Apply and derive changes to a solution, in the format of the banks."""

import difflib
from collections.abc import Iterator
from itertools import count

Hunk = tuple[int, int, list[str]]  # start and end of the lines to replace, and new lines


class BankError(ValueError):
    """An answer cannot be used; the message names it and says why."""


def changed(text: str, change: str) -> str:
    """Apply a change to a text.

    Raises:
        BankError: The old lines of a hunk do not occur exactly once in the text, or hunks overlap.
    """
    lines, untouched = text.splitlines(), len(text.splitlines())
    hunks = [hunk.splitlines() for hunk in change.replace("\n@@\n", "\n@@").split("\n@@")]
    for start, old, new in sorted(_placed(lines, hunks), reverse=True):
        if start + len(old) > untouched:
            raise BankError(f"two hunks change line {untouched + 1} of the solution")
        lines[start : start + len(old)] = new
        untouched = start
    return "\n".join(lines) + "\n"


def _placed(lines: list[str], hunks: list[list[str]]) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield the index of the line where each hunk starts, and its old and new lines."""
    for number, hunk in enumerate(hunks, start=1):
        if odd := [line for line in hunk if line[:1] not in ("", " ", "-", "+")]:
            raise BankError(f"hunk {number}: begin with ' ', '-' or '+', not as in {odd[0]!r}")
        old = [line[1:] for line in hunk if not line.startswith("+")]
        new = [line[1:] for line in hunk if not line.startswith("-")]
        starts = [i for i in range(len(lines)) if old and lines[i : i + len(old)] == old]
        if len(starts) != 1:
            block = "\n".join(old)
            raise BankError(f"hunk {number}: {len(starts)} times in the solution:\n{block}")
        yield starts[0], old, new


def change_between(text: str, wanted: str) -> str:
    """Return the change that turns ``text`` into ``wanted``, with just enough context."""
    lines, others = text.splitlines(), wanted.splitlines()
    opcodes = difflib.SequenceMatcher(None, lines, others, autojunk=False).get_opcodes()
    hunks = [(i, j, others[k:m]) for tag, i, j, k, m in opcodes if tag != "equal"]
    return "\n@@\n".join("\n".join(hunk) for hunk in _written(lines, hunks)) + "\n"


def _written(lines: list[str], hunks: list[Hunk]) -> Iterator[list[str]]:
    """Yield the lines of each hunk; hunks whose contexts touch or overlap are merged."""
    start, end, text = 0, -1, []
    for first, last, new in hunks:
        above, below = _surroundings(lines, first, last)
        if above > end:
            if text:
                yield text + _kept(lines[start:end])
            start, text = above, []
        text += _kept(lines[start:first]) + [f"-{line}" for line in lines[first:last]]
        text += [f"+{line}" for line in new]
        start, end = last, max(end, below)
    yield text + _kept(lines[start:end])


def _surroundings(lines: list[str], first: int, last: int) -> tuple[int, int]:
    """Return the smallest range of lines that includes these and occurs only once in the text."""
    contexts = ((size - below, below) for size in count() for below in range(size + 1))
    return next(
        (first - above, last + below)
        for above, below in contexts
        if above <= first and _occurrences(lines, lines[first - above : last + below]) == 1
    )


def _occurrences(lines: list[str], block: list[str]) -> int:
    starts = range(len(lines) if block else 0)
    return sum(lines[start : start + len(block)] == block for start in starts)


def _kept(lines: list[str]) -> list[str]:
    return [f" {line}" for line in lines]
