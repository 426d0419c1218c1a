"""Safe paths of reports: no other file is lost, and each report is written whole or not at all.

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
# How the reports begin, so that an earlier one is recognised.
HEADS = {
    "json": re.compile(r'\{\s*"schema": "distlab/grade/'),
    "junit": re.compile(r'(<\?xml [^>]*>\s*)?<testsuites name="distlab"'),
    "gradescope": re.compile(r'\{\s*"score": \d+,\s*"execution_time": \d+,\s*"output": "\d+ of '),
    "markdown": re.compile(r"## \d+ of \d+ points\n\n\| task \| function \|"),
}
_OWN_STREAM = re.compile(r"/dev/(?:stdout|stderr|fd/(\d+))|/proc/self/fd/(\d+)")


def parse(options: Sequence[str]) -> list[tuple[str, Path]]:
    """Read ``FORMAT=PATH`` options, remove earlier reports, and make the folders for new ones.

    Otherwise an earlier run's report could be taken for that of a run that fails.

    Raises:
        ValueError: The format is unknown, or the path must not or cannot be written; nothing was
            removed. The message is one line.
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
    """Remove an earlier report; raise if it is another user's in a shared folder."""
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
    return name, Path(os.path.abspath(path))  # unlike resolve(), keeps /dev/stdout


def _refuse_twice(paths: Sequence[Path]) -> None:
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ValueError(f"--report: {path} is named twice; each report needs its own file")
        seen.add(real)


def is_stream(path: Path) -> bool:
    """Return True for a device, a pipe or a descriptor: written to, never replaced."""
    if str(path).startswith(("/dev/std", "/dev/fd/", "/proc/")):
        return True  # even if the descriptor is a file's
    return path.exists() and not path.is_file() and not path.is_dir()


def _why_not(path: Path) -> str:
    """Return why a path cannot be written, "" if it can; nothing is changed."""
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
    """Write a report; a crash leaves either no report or a whole one in a file.

    Raises:
        OSError: The path cannot be written.
    """
    data = text.encode("utf-8", errors="replace")
    if not is_stream(path):
        files.write_whole(path, data)
        return
    with os.fdopen(_opened(path), "wb") as file, contextlib.suppress(BrokenPipeError):
        file.write(data)  # the reader may stop early


def _opened(path: Path) -> int:
    """Open a stream; an own descriptor keeps its position, even if it is a file's."""
    stream = _OWN_STREAM.fullmatch(str(path))
    if stream:
        number = {"/dev/stdout": 1, "/dev/stderr": 2}.get(stream[0])
        return os.dup(number or int(stream[1] or stream[2]))
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # a pipe without a reader is an error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileExistsError(f"{path} has become a file")
    os.set_blocking(descriptor, True)
    return descriptor
