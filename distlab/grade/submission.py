"""The learner's files: their paths, their SHA-256 digests, and their import on a rank.

ROOT/phase1_data_parallel/template_collectives.py      the learner's, in the course's folder
ROOT/phase1_data_parallel/collectives.py               the solution's, and a hand-in's

A phase's ``given.py`` and ``programs.py`` contain no tasks, so they always come from the course,
never from a hand-in.
"""

import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import itertools
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distlab import course
from distlab.course import CourseError
from distlab.grade import lending
from distlab.grade.lending import Functions, Loan
from distlab.grade.outcomes import LessonError
from distlab.lessons import COURSE, SOLUTIONS
from distlab.util import files

PREFIX = "template_"
GIVEN = ("given", "programs")  # modules that contain no tasks
MAX_FILES = 1000  # limit on the digests of a phase, and on the folders searched for files


@dataclass(frozen=True)
class Submission:
    """A folder laid out like the course's phases.

    Attributes:
        is_solution: True for the course's own ``solutions/``, which may import itself.
        loan: Functions that replace the submission's own.
    """

    root: Path
    is_solution: bool = False
    loan: Loan | None = None

    @property
    def lenders(self) -> tuple[str, ...]:
        """Folders of lent functions, which contain none of the learner's code."""
        return (str(self.loan.solutions),) if self.loan else ()

    def file(self, phase: str, lesson: str) -> Path:
        """Return the path of a lesson: its template's, unless only a file without prefix exists."""
        template, plain = self._files(phase, lesson)
        return plain if plain.is_file() and not template.is_file() else template

    def _files(self, phase: str, lesson: str) -> tuple[Path, Path]:
        folder = self.root / phase
        return folder / f"{PREFIX}{lesson}.py", folder / f"{lesson}.py"

    def sha256(self, phase: str, lesson: str) -> str:
        """Return the digest of a lesson's file; "" if it is missing."""
        file = self.file(phase, lesson)
        return _sha256(file) if file.is_file() else ""

    def digests(self, phase: str) -> dict[str, str]:
        """Return the digests of a phase's Python files, by path relative to the root.

        The digest of a file that is unreadable or too large is "". At most ``MAX_FILES`` files are
        included.
        """
        paths = sorted(itertools.islice(_python_files(self.root / phase), MAX_FILES))
        return {f.relative_to(self.root).as_posix(): _sha256(f) for f in paths}

    def load(self, phase: str, lesson: str) -> ModuleType:
        """Import a lesson, inside a rank.

        Raises:
            LessonError: The lesson is missing, exists twice, does not parse, fails or exits when
                imported, or imports the solutions.
        """
        file = self.file(phase, lesson)
        if not file.is_file():
            problem = "is not a regular file" if file.exists() else "is missing"
            raise LessonError(f"{file} {problem}")
        if all(path.is_file() for path in self._files(phase, lesson)):
            raise LessonError(
                f"{phase} holds {PREFIX}{lesson}.py and {lesson}.py: keep one of them"
            )
        if not any(isinstance(finder, _Lessons) for finder in sys.meta_path):
            _Lessons.install(self)
        try:
            return importlib.import_module(f"{phase}.{file.stem}")
        except SyntaxError as error:
            text = f"{(error.text or '').rstrip()}\n{' ' * ((error.offset or 1) - 1)}^"
            where = f"{error.filename or file}, line {error.lineno or 1}"
            raise LessonError(f"{where}: {_problem(error)}\n{text}".rstrip()) from None
        except SystemExit as error:
            raise LessonError(f"{file.name} calls sys.exit({error.code!r}) when imported") from None
        except BaseException as error:  # KeyboardInterrupt on a rank can only be the lesson's
            text = f"{type(error).__name__}: {error}"
            frame = self._last_frame(error)
            if frame is None:
                raise LessonError(f"{file.name} cannot be imported: {text}") from error
            where = f"{frame.filename}, line {frame.lineno}"
            raise LessonError(f"{where}: {text}\n    {frame.line}") from error

    def _last_frame(self, error: BaseException) -> traceback.FrameSummary | None:
        """Return the innermost frame of a traceback that is in the submission's phases."""
        below = f"{self.root}{os.sep}phase"
        frames = reversed(traceback.extract_tb(error.__traceback__))
        return next((frame for frame in frames if frame.filename.startswith(below)), None)


def _problem(error: SyntaxError) -> str:
    """Return Python's message about a file, with advice if it is probably saved as UTF-16."""
    has_nulls = "null bytes" in error.msg
    return f"{error.msg}: save it as UTF-8, not as UTF-16" if has_nulls else error.msg


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield Python files; links to folders are not followed, because they may form cycles."""
    for parent, _, names in itertools.islice(os.walk(folder), MAX_FILES):
        paths = (Path(parent, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())


def _sha256(file: Path) -> str:
    """Return the digest; "" if the file is unreadable, in which case importing it will say why."""
    try:
        return hashlib.sha256(files.read_regular(file, files.MAX_SOURCE_BYTES)).hexdigest()
    except OSError:
        return ""


class _Source(SourceFileLoader):
    """Compiles the source each time, because cached bytecode may not match it.

    Lent functions replace the file's own functions of the same names.
    """

    def __init__(self, name: str, file: str, lent: Functions) -> None:
        super().__init__(name, file)
        self._lent = lent

    def get_code(self, fullname: str) -> CodeType:
        """Compile without reading or writing bytecode in the hand-in."""
        path = self.get_filename(fullname)
        source: Any = self.get_data(path)
        if self._lent:
            source = lending.swapped(ast.parse(source, path), self._lent)
        code: CodeType = self.source_to_code(source, path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the file, and make sure that its module has the lent functions afterwards."""
        lending.lend(module, self._lent)
        super().exec_module(module)
        lending.keep(module, self._lent)

    def get_data(self, path: str) -> bytes:
        """Read a file; raise OSError if it is too large."""
        return files.read_regular(Path(path), files.MAX_SOURCE_BYTES)


class _Lessons(importlib.abc.MetaPathFinder):
    """Finds lessons only in the submission, under either file name, and refuses solutions.

    Without this finder, a file that a hand-in lacks would come from the course's own folder.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._lent: Mapping[str, Functions] = {}

    @classmethod
    def install(cls, submission: Submission) -> None:
        """Install the finder, then borrow functions, which import given code through the finder."""
        finder = cls(submission)
        sys.meta_path.insert(0, finder)
        if submission.loan:
            finder._lent = lending.borrowed(submission.loan)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the submission's phases; None for other modules.

        Raises:
            ImportError: The module is a solution or a judge, or is missing in the submission.
        """
        package, _, module = name.partition(".")
        if package == SOLUTIONS and not self._submission.is_solution:
            raise ImportError(f"a submission must not import {name}")
        if re.search(r"(^|\.)phase\d+\.(judge|reference)", name):
            raise ImportError(f"a submission must not import {name}, which judges it")
        if not package.startswith("phase") or not (self._submission.root / package).is_dir():
            return None
        return self._find(name, package, module)

    def _find(self, name: str, phase: str, module: str) -> ModuleSpec:
        """Find a module, or raise an error; after a None, Python would ask the next finder."""
        if module in GIVEN:
            file = COURSE / phase / f"{module}.py"
            return _spec(
                name, file, SourceFileLoader(name, str(file))
            )  # unlike a hand-in's bytecode, this can be trusted
        folder = self._submission.root.joinpath(*name.split("."))
        if folder.is_dir():
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        lesson = module.removeprefix(PREFIX)
        lent = self._lent.get(f"{phase}.{lesson}", {})
        for file in (folder.with_suffix(".py"), self._submission.file(phase, lesson)):
            if file.is_file():
                return _spec(name, file, _Source(name, str(file), lent))
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _spec(name: str, file: Path, loader: SourceFileLoader) -> ModuleSpec:
    spec = ModuleSpec(name, loader, origin=str(file))
    spec.has_location = True
    return spec


def find(choice: str, course_root: Path) -> Submission:
    """Return the submission that ``--impl`` names: "template", "solution" or a folder.

    Raises:
        CourseError: There is no such folder, or it has none of the course's phases.
    """
    solutions = course_root / SOLUTIONS
    root = {"template": course_root, "solution": solutions}.get(choice, Path(choice)).resolve()
    if choice == "solution" and not root.is_dir():
        raise CourseError(f"--impl solution: this copy of the course comes without {SOLUTIONS}/")
    if not root.is_dir():
        raise CourseError(f"--impl {choice}: no such folder; use template, solution or a folder")
    phases = [phase.folder for phase in course.load(course_root).phases]
    if not any((root / phase).is_dir() for phase in phases):
        raise CourseError(
            f"--impl {choice}: contains none of {', '.join(phases)}; put the files of a hand-in "
            f"into {Path(choice) / phases[0]}"
        )
    return Submission(root, is_solution=root == solutions.resolve())


def reference(course_root: Path) -> Submission | None:
    """Return the solutions; None in a copy of the course without them."""
    root = (course_root / SOLUTIONS).resolve()
    return Submission(root, is_solution=True) if root.is_dir() else None
