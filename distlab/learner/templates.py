"""The original templates (from git, or from copies that the first command made), and resets.

A reset always keeps a copy of the old file. If the file parses and contains the task's functions,
only those functions are replaced; otherwise, the template replaces the whole file.
"""

import contextlib
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import strftime

from distlab.course import Task
from distlab.learner import source
from distlab.learner.folder import CourseFolder, LearnerError, WriteError
from distlab.util import files

MAX_VERSIONS = 100  # largest number of versions of a file that are searched in git


def keep(folder: CourseFolder) -> None:
    """Copy templates that have not been copied yet; without git, ``reset`` needs the copies."""
    for task in folder.course.tasks:
        template, copy = folder.root / task.template, _copy(folder, task)
        with contextlib.suppress(OSError):  # only ``reset`` needs the copy
            if template.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(copy, template.read_bytes())


def _copy(folder: CourseFolder, task: Task) -> Path:
    return folder.private / "templates" / task.template


def untouched(folder: CourseFolder, task: Task) -> str:
    """Return the newest version of the template in which the task is unwritten.

    Raises:
        LearnerError: Neither git nor the copy has such a version.
    """
    for text in _versions(folder, task):
        if source.to_write(task, text).keys() >= {*task.functions}:
            return text
    raise LearnerError(
        f"neither git nor {folder.private.name}/templates has {task.template} "
        f"with {task.label} unwritten"
    )


def _versions(folder: CourseFolder, task: Task) -> Iterator[str]:
    """Yield the file's versions in git, including the learner's, newest first; then the copy."""
    root, path = folder.root, task.template
    commits = _git(root, "rev-list", f"--max-count={MAX_VERSIONS}", "HEAD", "--", str(path))
    for commit in commits.split():
        yield _git(root, "show", f"{commit}:./{path.as_posix()}")
    yield source.read(_copy(folder, task))


def _git(root: Path, *arguments: str) -> str:
    """Return git's output; "" if git fails or is missing, or if there is no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


# Resets


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


def plan_reset(folder: CourseFolder, task: Task) -> Plan:
    """Prepare a reset without changing any file.

    Raises:
        LearnerError: No original template was found.
    """
    original = untouched(folder, task)
    before = contents(folder, task)
    after = _with_functions(before, task, original)
    return Plan(before, original.encode() if after is None else after, after is None)


def reset(folder: CourseFolder, task: Task, planned: Plan) -> Path:
    """Write the new file; return the path of the copy of the old one.

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


def contents(folder: CourseFolder, task: Task) -> bytes:
    """Return the learner's file; b"" if there is none."""
    path = folder.root / task.template
    try:
        return files.read_regular(path, files.MAX_SOURCE_BYTES)
    except FileNotFoundError:
        return b""


def _unused(parent: Path, name: str) -> Path:
    """Return a new path with the time in its name, so that no copy overwrites an older one."""
    stamp = strftime("%Y-%m-%d_%H.%M.%S")
    count = len(list(parent.glob(f"{stamp}*")))
    return parent / f"{stamp}{f'_{count}' if count else ''}_{name}"


def _with_functions(data: bytes, task: Task, original: str) -> bytes | None:
    """Put the original functions into a file; return None if the result would be broken."""
    try:
        text, encoding = source.decoded(data)
    except source.UNREADABLE:
        return None
    after_reset = spliced(text, source.to_write(task, original))
    after = after_reset.encode(encoding, errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(after, "", "exec", dont_inherit=True)  # also finds a return outside functions
    except source.UNPARSABLE:
        return None
    is_complete = source.to_write(task, after.decode(encoding)).keys() >= {*task.functions}
    return after if is_complete else None


def spliced(text: str, originals: Mapping[str, str]) -> str:
    """Replace the first definition of each function with the original; remove later definitions."""
    lines, tree = source.split(text), source.parse(text)
    places = [(source.span(node), name) for name, node in source.defined(tree)] if tree else []
    first = {name: place for place, name in reversed(places)}
    for place, name in sorted(places, key=lambda entry: -entry[0].start):
        if name in originals:
            end = "\r\n" if lines[place.start].endswith("\r\n") else "\n"
            original = originals[name].replace("\r\n", "\n").replace("\n", end)
            lines[place] = [original] if place == first[name] else []
    return "".join(lines)
