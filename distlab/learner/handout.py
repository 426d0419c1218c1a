"""The student's version of the course: no solutions, no wrong answers, nothing of git.

Wrong answers are left out, as they are small changes of the solutions, and so are the pages for
those who teach the course or work on it.
"""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from distlab.course import Challenge
from distlab.learner import source
from distlab.learner.folder import CourseFolder, LearnerError, WriteError
from distlab.learner.pages import Page

LEFT_OUT = (
    *("solutions", "tests/wrong_answers", "tests/lab", "benchmarks", "scripts"),
    *("CONTRIBUTING.md", "docs/grading.md", "docs/results.md", "mkdocs.yml"),
    "distlab/learner/students_readme.md",  # README.md there
)
MADE = ("data", "out")  # by commands
NOT_OURS = ("__pycache__", "build", "dist")
HIDDEN = (".gitignore", ".devcontainer")  # but handed out
NAMES_ALL = "AGENTS.md"  # what assistants must not read
STUDENTS_README = Path(__file__).with_name("students_readme.md")  # its links start at the root


def write(folder: CourseFolder, target: Path) -> int:
    """Copy what a student needs into a new folder; return how many files.

    Raises:
        LearnerError: the new folder is not empty, or lies inside the course's, or a
            task is written.
        WriteError: it cannot be written.
    """
    target = target.resolve()
    if target.is_relative_to(folder.root):
        raise LearnerError(f"{target} lies inside the course: name a folder outside {folder.root}")
    if target.is_dir() and any(target.iterdir()):
        raise LearnerError(f"{target} is not empty: name a new folder")
    _check_unwritten(folder)
    files = list(_files(folder.root, folder.root))
    try:
        for file in files:
            copy = target / file.relative_to(folder.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(file, copy, PurePosixPath(file.relative_to(folder.root)))
    except OSError as error:
        place = error.filename or target
        raise WriteError(f"{place} cannot be written: {error.strerror or error}") from None
    return len(files)


def _copy(file: Path, copy: Path, path: PurePosixPath) -> None:
    shutil.copy(STUDENTS_README if path.name == "README.md" else file, copy)
    if file.suffix == ".md":
        page = Page(path, LEFT_OUT, may_name=path.name == NAMES_ALL)
        copy.write_text(page.edited(copy.read_text(encoding="utf-8")), encoding="utf-8")


def _files(root: Path, parent: Path) -> Iterator[Path]:
    for path in sorted(parent.iterdir()):
        name = path.relative_to(root).as_posix()
        is_private = path.name.startswith(".") and path.name not in HIDDEN
        is_left_out = is_private or name in (*LEFT_OUT, *MADE) or path.name in NOT_OURS
        if is_left_out or path.name.endswith(".egg-info") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(root, path)
        elif path.is_file():
            yield path


def _check_unwritten(folder: CourseFolder) -> None:
    """Refuse to hand out a template in which a task is written: it would be somebody's answer."""
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
    """Whether an open task is more than its docstring and one line, as the course gives it."""
    tree = source.parse(source.read(path))
    if tree is None:  # nobody can tell what is in it
        return True
    function = dict(source.defined(tree)).get(challenge.function)
    if function is None:
        return False
    return len(function.body) > 2 or not isinstance(function.body[-1], ast.Expr | ast.Return)
