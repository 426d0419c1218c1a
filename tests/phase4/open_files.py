"""Which files and folders a program still holds open."""

import os
from collections.abc import Iterator
from pathlib import Path

Identity = tuple[int, int]  # the device, and the number that a file or a folder has on it


def open_in(folder: Path) -> list[str]:
    """Name what this process holds open of a folder and of what is in it, once a descriptor.

    A file without a name any more isn't found.

    Returns:
        Paths from ``folder``, of which ``.`` is itself, sorted.
    """
    names = {_identity(os.stat(path)): path for path in (folder, *folder.rglob("*"))}
    found = (names.get(identity) for identity in _open_identities())
    return sorted(str(path.relative_to(folder)) for path in found if path is not None)


def _open_identities() -> Iterator[Identity]:
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            yield _identity(os.fstat(descriptor))
        except OSError:  # the one by which they are listed is closed by now
            continue


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
