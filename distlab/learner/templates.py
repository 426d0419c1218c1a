"""The original templates: in git, or in the copy that the first command made."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from distlab.course import Task
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.source import read, to_write
from distlab.util import files

MAX_VERSIONS = 100  # number of versions of a file to look at in git


def keep(folder: CourseFolder) -> None:
    """Copy templates that were not copied yet; ``reset`` needs the copies without git."""
    for task in folder.course.tasks:
        template, copy = folder.root / task.template, _copy(folder, task)
        with contextlib.suppress(OSError):  # only ``reset`` needs the copy
            if template.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(copy, template.read_bytes())


def _copy(folder: CourseFolder, task: Task) -> Path:
    return folder.private / "templates" / task.template


def untouched(folder: CourseFolder, task: Task) -> str:
    """Return the newest text of the template in which the task is unwritten.

    Raises:
        LearnerError: Neither git nor the copy has such a text.
    """
    for text in _versions(folder, task):
        if to_write(task, text).keys() >= {*task.functions}:
            return text
    raise LearnerError(
        f"neither git nor {folder.private.name}/templates has {task.template} "
        f"with {task.label} unwritten"
    )


def _versions(folder: CourseFolder, task: Task) -> Iterator[str]:
    """Yield all texts in git, newest first, because learners also commit; then the copy."""
    root, path = folder.root, task.template
    commits = _git(root, "rev-list", f"--max-count={MAX_VERSIONS}", "HEAD", "--", str(path))
    for commit in commits.split():
        yield _git(root, "show", f"{commit}:./{path.as_posix()}")
    yield read(_copy(folder, task))


def _git(root: Path, *arguments: str) -> str:
    """Return git's output, "" without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
