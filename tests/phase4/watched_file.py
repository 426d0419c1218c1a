"""What a file has held at any moment, also between two calls of one line.

Python tells of what is about to happen to a file, by audit events: it is opened and emptied, cut,
renamed, removed. And between two lines of Python the file is looked at.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class Watched:
    """A file, and all that was seen in it since it is watched, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[bytes] = []
        self.is_looking = False

    def look(self) -> None:
        """Note what is there now; nothing, if there is no file."""
        self._note(self._content(self.path))

    def expect(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what will be there after an event."""
        first, *others = arguments
        if event == "open" and (others[-1] or 0) & os.O_TRUNC and self._is_it(first):
            self._note(b"")
        elif event == "os.truncate" and self._is_it(first):
            self._note(self._content(self.path)[: others[0]])
        elif event in ("os.remove", "os.rename") and self._is_it(first):
            self._note(b"")
        elif event == "os.rename" and self._is_it(others[0]):
            self._note(self._content(Path(os.fsdecode(first))))

    def trace(self, frame: FrameType, kind: str, argument: object) -> Any:
        """Look at each line."""
        if not self.is_looking:
            self.look()
        return self.trace

    def _is_it(self, file: Any) -> bool:
        try:
            return os.path.samefile(file, self.path)
        except (OSError, TypeError, ValueError):  # it isn't there, or there is none
            return False

    def _content(self, path: Path) -> bytes:
        self.is_looking = True
        try:
            return path.read_bytes()
        except OSError:
            return b""
        finally:
            self.is_looking = False

    def _note(self, content: bytes) -> None:
        if not self.seen or self.seen[-1] != content:
            self.seen.append(content)


_watched: list[Watched] = []


@contextmanager
def watched(path: Path) -> Iterator[Watched]:
    """Watch a file meanwhile."""
    if not hasattr(sys, "_watches_one_file"):
        sys.addaudithook(_hear)  # can't be taken back
        sys._watches_one_file = True  # type: ignore[attr-defined]
    file, before = Watched(path), sys.gettrace()
    file.look()
    _watched.append(file)
    sys.settrace(file.trace)
    try:
        yield file
    finally:
        sys.settrace(before)
        _watched.clear()
        file.look()


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    is_told = event in ("open", "os.truncate", "os.remove", "os.rename")
    if is_told and _watched and not _watched[0].is_looking:
        _watched[0].expect(event, arguments)
