"""Reset of a task's functions to their template; the old file is always kept.

the file parses and has the functions    only the functions are replaced
otherwise                                the whole file becomes the template
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import strftime

from distlab.course import Task
from distlab.learner import templates
from distlab.learner.folder import CourseFolder, WriteError
from distlab.learner.source import (
    UNPARSABLE,
    UNREADABLE,
    decoded,
    defined,
    parse,
    span,
    split,
    to_write,
)
from distlab.util import files


@dataclass(frozen=True)
class Plan:
    """A prepared reset.

    Attributes:
        before: Contents of the learner's file.
        after: Contents after the reset.
        is_whole: True if the whole file is replaced, not only the task's functions.
    """

    before: bytes
    after: bytes
    is_whole: bool


def plan(folder: CourseFolder, task: Task) -> Plan:
    """Prepare a reset without changing a file.

    Raises:
        LearnerError: There is no template.
    """
    original = templates.untouched(folder, task)
    before = _bytes(folder.root / task.template)
    after = _with_functions(before, task, original)
    return Plan(before, original.encode() if after is None else after, after is None)


def carry_out(folder: CourseFolder, task: Task, planned: Plan) -> Path:
    """Write the new file; return where the old one is kept.

    Raises:
        WriteError: The copy or the file cannot be written; the file was not changed.
    """
    path, parent = folder.root / task.template, folder.private / "reset" / task.id
    try:
        parent.mkdir(parents=True, exist_ok=True)
        old = _unused(parent, path.name)
        old.write_bytes(planned.before)
        files.write_whole(path, planned.after)
    except OSError as error:
        reason = f"{error.filename or parent}: {error.strerror or error}"
        raise WriteError(f"nothing was changed: {reason}") from None
    return old


def _bytes(path: Path) -> bytes:
    try:
        return files.read_regular(path, files.MAX_SOURCE_BYTES)
    except FileNotFoundError:
        return b""


def _unused(parent: Path, name: str) -> Path:
    """Return a new file name with the time, so that no copy overwrites an older one."""
    stamp = strftime("%Y-%m-%d_%H.%M.%S")
    count = len(list(parent.glob(f"{stamp}*")))
    return parent / f"{stamp}{f'_{count}' if count else ''}_{name}"


def _with_functions(data: bytes, task: Task, original: str) -> bytes | None:
    """Return the file with the functions of the original; None if the result would be broken."""
    try:
        text, encoding = decoded(data)
    except UNREADABLE:
        return None
    after = _spliced(text, to_write(task, original)).encode(encoding, errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(after, "", "exec", dont_inherit=True)  # also finds a return outside a function
    except UNPARSABLE:
        return None
    is_complete = to_write(task, after.decode(encoding)).keys() >= {*task.functions}
    return after if is_complete else None


def _spliced(text: str, originals: Mapping[str, str]) -> str:
    """Replace the first definition of each function by the original, and remove further ones."""
    lines, tree = split(text), parse(text)
    places = [(span(node), name) for name, node in defined(tree)] if tree else []
    first = {name: place for place, name in reversed(places)}
    for place, name in sorted(places, key=lambda entry: -entry[0].start):
        if name in originals:
            end = "\r\n" if lines[place.start].endswith("\r\n") else "\n"
            original = originals[name].replace("\r\n", "\n").replace("\n", end)
            lines[place] = [original] if place == first[name] else []
    return "".join(lines)
