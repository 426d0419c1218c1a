"""Temporary folders for bodies; files that an answer writes to relative paths vanish with them."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# One working directory for each rank in a folder, since simulated ranks share a process.
_before: list[str] = []


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make ``folder`` the working directory; a wrong answer may write a file named ``None``."""
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
