"""Which files a program opens in order to read them, and on which rank."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from phase4.file_history import listening


class Read(NamedTuple):
    """A file was opened, and not in order to write it."""

    rank: int
    path: Path  # relative to the folder


@contextmanager
def reads_in(folder: Path, rank_of_caller: Callable[[], int] = int) -> Iterator[list[Read]]:
    """List what is read in ``folder`` meanwhile, whatever Python opens it with.

    Args:
        folder: an absolute path; it need not exist yet.
        rank_of_caller: who reads, asked in the thread that does; everybody is rank 0 by default.
    """
    found: list[Read] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        path = _read_file(*arguments) if name == "open" else None
        if path is not None and path.is_relative_to(folder):
            found.append(Read(rank_of_caller(), path.relative_to(folder)))

    with listening(note):
        yield found


def _read_file(path: Any, _mode: object, flags: int) -> Path | None:
    """Return what is about to be read; None: it is written, a folder, or has no name."""
    if flags & os.O_ACCMODE != os.O_RDONLY or isinstance(path, int):
        return None
    file = Path(os.path.abspath(os.fsdecode(path)))
    return file if file.is_file() else None
