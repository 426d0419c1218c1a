"""Paths of reports: only earlier reports are overwritten, and none is left half-written.

An existing file is replaced only if it is empty or an earlier report.
"""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distlab.util import files

HEAD_CHARACTERS = 400
# Patterns for the beginnings of reports, by which earlier reports are recognised.
HEADS = {
    "json": re.compile(r'\{\s*"schema": "distlab/grade/'),
    "junit": re.compile(r'(<\?xml [^>]*>\s*)?<testsuites name="distlab"'),
    "gradescope": re.compile(r'\{\s*"score": \d+,\s*"execution_time": \d+,\s*"output": "\d+ of '),
    "markdown": re.compile(r"## \d+ of \d+ points\n\n\| task \| function \|"),
}
_OWN_STREAM = re.compile(r"/dev/(?:stdout|stderr|fd/(\d+))|/proc/self/fd/(\d+)")


def parse(options: Sequence[str]) -> list[tuple[str, Path]]:
    """Read ``FORMAT=PATH`` options, remove earlier reports, and make the folders for new ones.

    If this run failed, an earlier report that stayed in place could be mistaken for its report. All
    options are checked before anything is removed.

    Raises:
        ValueError: A format is unknown, or a path cannot or must not be written to. The message
            is one line.
    """
    chosen = [_split(option) for option in options]
    for option, (_, path) in zip(options, chosen, strict=True):
        reason = _why_not(path)
        if reason:
            raise ValueError(f"--report {option}: {reason}")
    _refuse_twice([path for _, path in chosen])
    for option, (_, path) in zip(options, chosen, strict=True):
        _remove_earlier(option, path)
    return chosen


def _remove_earlier(option: str, path: Path) -> None:
    """Remove an earlier report; raise ValueError if that fails, e.g. on another user's file."""
    if is_stream(path):
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"--report {option}: {path} cannot be replaced: {error.strerror}"
        ) from None


def _split(option: str) -> tuple[str, Path]:
    name, _, path = option.partition("=")
    if name not in HEADS or not path:
        raise ValueError(f"--report {option}: write FORMAT=PATH with one of {', '.join(HEADS)}")
    return name, Path(os.path.abspath(path))  # unlike resolve(), this keeps /dev/stdout


def _refuse_twice(paths: Sequence[Path]) -> None:
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ValueError(f"--report: {path} is named twice; each report needs its own file")
        seen.add(real)


def is_stream(path: Path) -> bool:
    """Return True for a device, pipe or descriptor, which is written to rather than replaced."""
    if str(path).startswith(("/dev/std", "/dev/fd/", "/proc/")):
        return True  # even if the descriptor is that of a file
    return path.exists() and not path.is_file() and not path.is_dir()


def _why_not(path: Path) -> str:
    """Return why a path cannot be written to, or "" if it can; create its folder if necessary."""
    try:
        if path.is_dir():
            return f"{path} cannot be written: it is a folder; name a file"
        if is_stream(path):
            return "" if os.access(path, os.W_OK) else f"{path} cannot be written"
        if path.exists() and not is_earlier_report(path):
            return f"{path} is not an earlier report; move it, or name another file"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"


def is_earlier_report(path: Path) -> bool:
    """Return True if a file is a report of any format, or empty."""
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(HEAD_CHARACTERS)
    return not head or any(pattern.match(head) for pattern in HEADS.values())


def write(path: Path, text: str) -> None:
    """Write a report, atomically if the path is a file.

    Raises:
        OSError: The path cannot be written to.
    """
    data = text.encode("utf-8", errors="replace")
    if not is_stream(path):
        files.write_whole(path, data)
        return
    with os.fdopen(_opened(path), "wb") as file, contextlib.suppress(BrokenPipeError):
        file.write(data)  # the reader may stop before the end


def _opened(path: Path) -> int:
    """Open a stream for writing; a descriptor of this process keeps its position in a file."""
    stream = _OWN_STREAM.fullmatch(str(path))
    if stream:
        number = {"/dev/stdout": 1, "/dev/stderr": 2}.get(stream[0])
        return os.dup(number or int(stream[1] or stream[2]))
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails for a pipe without a reader
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(f"{path} has become a file")
    os.set_blocking(descriptor, True)
    return descriptor
