"""Folders for bodies: files that an answer writes, wherever it does, disappear with them."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_before: list[str] = []  # one entry per rank inside; simulated ranks are threads of one process


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Let relative paths lead into ``folder``: a wrong answer may write a file ``None``, say."""
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
