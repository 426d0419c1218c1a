"""Who calls the program's functions that make collective calls, such as ``mean_over_ranks``."""

import linecache
import sys
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

from distlab.sim.reporting.sites import PROGRAM, Places, Site


class Caller(NamedTuple):
    """The place from which the program calls a function of its own.

    Attributes:
        text: Source of the call, such as ``mean_over_ranks(loss)``.
    """

    site: Site
    text: str


class Callers:
    """Finds the caller of the function that runs now."""

    def __init__(self, places: Places) -> None:
        self._places = places
        # By code and instruction, since Python walks a table to find a place in the source.
        self._known: dict[tuple[CodeType, int], Caller] = {}

    def current(self) -> Caller:
        """Return the caller of the program's innermost function on the stack."""
        frame = next(islice(self._frames(), 1, None), None)
        if frame is None:
            return Caller(("", 0, ""), "")
        place = frame.f_code, frame.f_lasti
        if place not in self._known:
            site = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            self._known[place] = Caller(site, _text(*place) or linecache.getline(*site[:2]).strip())
        return self._known[place]

    def is_torch_in(self, folder: str) -> bool:
        """Return whether the program has called what runs now by torch's code in a folder."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and self._places.kind(frame.f_code.co_filename) != PROGRAM:
            if frame.f_code.co_filename.startswith(folder):
                return True
            frame = frame.f_back
        return False

    def _frames(self) -> Iterator[FrameType]:
        """Yield the program's frames, the innermost first."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if self._places.kind(frame.f_code.co_filename) == PROGRAM:
                yield frame
            frame = frame.f_back


def _text(code: CodeType, instruction: int) -> str:
    """Return the source of a call; "" if it has several lines, or before Python 3.11."""
    if sys.version_info < (3, 11):
        return ""
    places = islice(code.co_positions(), instruction // 2, None)
    line, last, start, end = next(places, (None,) * 4)
    if line is None or line != last:
        return ""
    source = linecache.getline(code.co_filename, line).encode()
    return source[start:end].decode()
