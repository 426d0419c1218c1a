"""Read files safely, even if they turn out to be pipes or huge, and replace files atomically."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

MAX_SOURCE_BYTES = 2**20  # limit for one Python file; the largest solution has 16 KiB


def read_regular(path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``.

    Raises:
        OSError: The path is a pipe, a device or a folder, or the file is too large or cannot be
            read. The message can be shown to users.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        data = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    num_bytes = max(len(data), status.st_size)  # the file may be growing
    if num_bytes > max_bytes:
        raise OSError(f"{path.name} has {num_bytes:,} bytes, limit {max_bytes:,}")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Create a file or replace its content atomically: no reader sees a partial file.

    A replaced file keeps its permissions. If ``path`` is a link, the file that it points to is
    replaced.
    """
    path = path.resolve()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        with contextlib.suppress(OSError):  # if there is no file to replace
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
