"""The templates as the course gives them: in git, or in the copy that the first command made."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from distlab.course import Task
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.source import read, to_write
from distlab.util import files

MAX_VERSIONS = 100  # of a file in git, newest first


def keep(folder: CourseFolder) -> None:
    """Copy templates that were not copied yet: they are what ``reset`` has without git."""
    for task in folder.course.tasks:
        template, copy = folder.root / task.template, _copy(folder, task)
        with contextlib.suppress(OSError):  # without it, all but ``reset`` works
            if template.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(copy, template.read_bytes())


def _copy(folder: CourseFolder, task: Task) -> Path:
    return folder.private / "templates" / task.template


def untouched(folder: CourseFolder, task: Task) -> dict[str, str]:
    """Return the task's functions as the course gives them, by name.

    Raises:
        LearnerError: neither git nor the copy has them.
    """
    for text in _versions(folder.root, task.template):
        found = to_write(task, text)
        if found.keys() >= {*task.functions}:
            return found
    found = to_write(task, read(_copy(folder, task)))
    if not found.keys() >= {*task.functions}:
        raise LearnerError(
            f"neither git nor {folder.private.name}/templates has {task.template} "
            f"with {task.label} unwritten"
        )
    return found


def _versions(root: Path, path: Path) -> Iterator[str]:
    """Yield what git has of a file, newest first: learners commit their own code as well."""
    commits = _git(root, "rev-list", f"--max-count={MAX_VERSIONS}", "HEAD", "--", str(path))
    for commit in commits.split():
        yield _git(root, "show", f"{commit}:./{path.as_posix()}")


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints, "" if it or the repository is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
