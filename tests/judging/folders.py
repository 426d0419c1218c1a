"""Temporary folders for bodies, so that files which an answer writes to relative paths vanish."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_before: list[str] = []  # one entry per rank in a folder: simulated ranks share a process


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make ``folder`` the working directory, because a wrong answer may write a file ``None``."""
    _before.append(_before[0] if _before else os.getcwd())
    os.chdir(folder)
    try:
        yield
    finally:
        before = _before.pop()
        if not _before:
            os.chdir(before)


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a new folder, which is also the working directory."""
    with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
        yield Path(folder)
