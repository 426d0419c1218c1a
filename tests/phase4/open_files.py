"""The files and folders that a program still holds open."""

import os
from collections.abc import Iterator
from pathlib import Path

Identity = tuple[int, int]  # device, and number of a file or a folder on it


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
