"""The contents of a file at any moment, also between two calls of one line.

Python announces what it is about to do to a file, by audit events: it is opened and emptied, cut,
renamed, removed. And between two lines of Python the file is looked at.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from phase4.file_history import listening


class _Watch:
    def __init__(self, path: Path) -> None:
        self.path, self.contents, self.is_looking = path, list[bytes](), False

    def look(self) -> None:
        """Note the content, b"" if there is no file."""
        self._note(self._content(self.path))

    def announce(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what the content will be after an event."""
        if self.is_looking or event not in ("open", "os.truncate", "os.remove", "os.rename"):
            return
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
        except (OSError, TypeError, ValueError):  # it doesn't exist, or has no name
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
        if not self.contents or self.contents[-1] != content:
            self.contents.append(content)


@contextmanager
def watched(path: Path) -> Iterator[list[bytes]]:
    """Watch a file while the context is open; yield its contents, in order."""
    watch, before = _Watch(path), sys.gettrace()
    watch.look()
    with listening(watch.announce):
        sys.settrace(watch.trace)
        try:
            yield watch.contents
        finally:
            sys.settrace(before)
    watch.look()
