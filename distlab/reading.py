"""Reading files that somebody else may have replaced: by a pipe, a device, or a terabyte."""

import os
import stat
from pathlib import Path

MAX_SOURCE_BYTES = 2**20  # of one file of Python; the largest solution has 16 KiB


def regular_file(path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``.

    Raises:
        OSError: it is none, is larger, or cannot be read; the message is for people.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        data = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    num_bytes = max(len(data), status.st_size)  # it may be growing
    if num_bytes > max_bytes:
        raise FileTooLargeError(f"{path.name} has {num_bytes:,} bytes, limit {max_bytes:,}")
    return data


class FileTooLargeError(OSError):
    """A file is larger than what is read of such a file."""
