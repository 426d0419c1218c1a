"""The files that a program opens in order to read them, and those that it still holds open."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from phase4.file_history import listening

Identity = tuple[int, int]  # device, and number of a file or a folder on it


class Read(NamedTuple):
    """A file that was opened, and not in order to write it."""

    rank: int
    path: Path  # relative to the folder


@contextmanager
def reads_in(folder: Path, rank_of_caller: Callable[[], int] = int) -> Iterator[list[Read]]:
    """List the files of ``folder`` that are read in the context, whatever Python opens them with.

    Args:
        folder: Absolute path; the folder need not exist yet.
        rank_of_caller: Rank of the thread that calls it; always 0 by default.
    """
    reads: list[Read] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        path = _read_file(*arguments) if name == "open" else None
        if path is not None and path.is_relative_to(folder):
            reads.append(Read(rank_of_caller(), path.relative_to(folder)))

    with listening(note):
        yield reads


def _read_file(path: Any, _mode: object, flags: int) -> Path | None:
    """Return the file to be read; None if it is written, a folder, or without a name."""
    if flags & os.O_ACCMODE != os.O_RDONLY or isinstance(path, int):
        return None
    file = Path(os.path.abspath(os.fsdecode(path)))
    return file if file.is_file() else None


def open_in(folder: Path) -> list[str]:
    """Return the open files in a folder, once for each descriptor, and ``.`` for the folder.

    Files that have lost their names are missing.
    """
    names = {_identity(os.stat(path)): path for path in (folder, *folder.rglob("*"))}
    paths = (names.get(identity) for identity in _open_identities())
    return sorted(str(path.relative_to(folder)) for path in paths if path is not None)


def _open_identities() -> Iterator[Identity]:
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            yield _identity(os.fstat(descriptor))
        except OSError:  # the descriptor of the listing itself is closed by now
            continue


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
