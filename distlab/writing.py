"""Writing files so that a reader gets the old one or the new one, never half of one."""

import contextlib
import os
import shutil
from pathlib import Path


def whole_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file, or make one; its permissions stay."""
    path = path.resolve()  # a link stays one
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(data)
        with contextlib.suppress(OSError):  # there was none
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
