"""The students' version of the course: everything in git except the solutions and related files.

The related files are the wrong answers, which are slight variations of the solutions, and the pages
for people who teach or develop the course. A test checks that the remaining pages mention none of
the files left out.
"""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

from distlab import lessons
from distlab.course import Challenge
from distlab.learner import source
from distlab.learner.folder import CourseFolder, LearnerError, WriteError

LEFT_OUT = (
    *("solutions", "tests/wrong_answers", "tests/lab", "mkdocs.yml"),
    *("CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/grading.md"),
    *("docs/results.md", "docs/trainer.md", "distlab/learner/students_readme.md"),
)
GENERATED = ("data", "out")
NOT_IN_GIT = ("__pycache__", "build", "dist")
HIDDEN = (".gitignore", ".devcontainer")  # hidden files and folders that are handed out
README = "distlab/learner/students_readme.md"  # its links are relative to the root


def write(folder: CourseFolder, target: Path) -> int:
    """Copy the students' files into a new folder; return the number of files.

    Raises:
        LearnerError: The new folder is not empty or lies inside the course's folder, or a task is
            already solved.
        WriteError: The new folder cannot be written.
    """
    target = target.resolve()
    if target.is_relative_to(folder.root):
        raise LearnerError(f"{target} lies inside the course: name a folder outside {folder.root}")
    if target.is_dir() and any(target.iterdir()):
        raise LearnerError(f"{target} is not empty: name a new folder")
    _check_unwritten(folder)
    root = folder.root
    files = {str(file.relative_to(root)): file for file in _files(root, root)}
    files |= {new: root / old for old, new in _moved().items() if (root / old).exists()}
    try:
        for new, file in files.items():
            copy = target / new
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    except OSError as error:
        place = error.filename or target
        raise WriteError(f"{place} cannot be written: {error.strerror or error}") from None
    return len(files)


def _moved() -> dict[str, str]:
    """Return the old and the new place of each file that is handed out in another place."""
    trainer = f"{lessons.folder(4)}/imagenet_trainer.py"  # needed to train, and no answer
    return {README: "README.md", f"{lessons.SOLUTIONS}/{trainer}": trainer}


def _files(root: Path, parent: Path) -> Iterator[Path]:
    for path in sorted(parent.iterdir()):
        name = path.relative_to(root).as_posix()
        is_private = path.name.startswith(".") and path.name not in HIDDEN
        is_left_out = is_private or name in (*LEFT_OUT, *GENERATED) or path.name in NOT_IN_GIT
        if is_left_out or path.name.endswith(".egg-info") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(root, path)
        elif path.is_file():
            yield path


def _check_unwritten(folder: CourseFolder) -> None:
    """Refuse to hand out a template with a solved task: the code may be a learner's answer."""
    for task in folder.course.tasks:
        left = source.to_write(task, source.read(folder.root / task.template))
        written = [name for name in task.functions if name not in left]
        if written:
            raise LearnerError(
                f"{written[0]} in {task.template} is written, and students would get it: "
                f"distlab reset {task.id}"
            )
    for phase in folder.course.phases:
        if phase.challenge and _is_solved(folder.root / phase.challenge.template, phase.challenge):
            raise LearnerError(
                f"{phase.challenge.function} in {phase.challenge.template} is solved, and students "
                "would get it: put back the single line that it begins with"
            )


def _is_solved(path: Path, challenge: Challenge) -> bool:
    """Return True if an open task's function has more than a docstring and the given line."""
    tree = source.parse(source.read(path))
    if tree is None:  # a file that does not parse may contain an answer
        return True
    function = dict(source.defined(tree)).get(challenge.function)
    if function is None:
        return False
    return len(function.body) > 2 or not isinstance(function.body[-1], ast.Expr | ast.Return)
