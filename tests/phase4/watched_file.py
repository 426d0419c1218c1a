"""The contents of a file at any moment, also between two calls of one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


@contextmanager
def watched(path: Path) -> Iterator[list[bytes]]:
    """Look at a file before each bytecode of this thread; yield its contents, in order.

    The content is b"" while there is no file.
    """
    contents: list[bytes] = []

    def look() -> None:
        content = path.read_bytes() if path.exists() else b""
        if not contents or contents[-1] != content:
            contents.append(content)

    def trace(frame: FrameType, kind: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        look()
        return trace

    before = sys.gettrace()
    look()
    sys.settrace(trace)
    try:
        yield contents
    finally:
        sys.settrace(before)
    look()
