"""The learner's files: where they are, what they are (SHA-256), and how a rank imports them.

ROOT/phase1_data_parallel/template_collectives.py      the learner's, in the course's folder
ROOT/phase1_data_parallel/collectives.py               the solution's, and a hand-in's
"""

import hashlib
import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from distlab.grade.outcomes import LessonError

SOLUTIONS = "solutions"


@dataclass(frozen=True)
class Submission:
    """A folder laid out like the course's phases."""

    root: Path

    def file(self, phase: str, lesson: str) -> Path:
        """Return the file of a lesson; the template's, where neither is there."""
        folder = self.root / phase
        template, plain = folder / f"template_{lesson}.py", folder / f"{lesson}.py"
        return plain if plain.is_file() and not template.is_file() else template

    def sha256(self, phase: str, lesson: str) -> str:
        """Return the digest of a lesson's file, "" if it is missing."""
        file = self.file(phase, lesson)
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

    @property
    def is_solution(self) -> bool:
        """Whether this is the course's own ``solutions/``."""
        return self.root.name == SOLUTIONS and (self.root / "__init__.py").is_file()

    def load(self, phase: str, lesson: str) -> ModuleType:
        """Import a lesson, inside a rank.

        Raises:
            LessonError: it is missing, does not parse, fails or exits when imported, or imports the
                solutions.
        """
        file = self.file(phase, lesson)
        if not file.is_file():
            raise LessonError(f"{file} is missing")
        self._prepare()
        try:
            return importlib.import_module(f"{phase}.{file.stem}")
        except SyntaxError as error:
            raise LessonError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
        except SystemExit as error:
            raise LessonError(f"{file.name} calls sys.exit({error.code!r}) when imported") from None
        except Exception as error:
            raise LessonError(
                f"{file.name} cannot be imported: {type(error).__name__}: {error}"
            ) from error

    def _prepare(self) -> None:
        """Make this folder the first where modules are looked for, once per process."""
        if sys.path[0] == str(self.root):
            return
        sys.path.insert(0, str(self.root))
        if not self.is_solution:
            sys.meta_path.insert(0, _NoSolutions())


class _NoSolutions(importlib.abc.MetaPathFinder):
    """Refuses the solutions to a submission."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == SOLUTIONS:
            raise ImportError(f"a submission must not import {name}")
        return None


def find(choice: str, course_root: Path) -> Submission:
    """Return the submission that ``--impl`` names: "template", "solution" or a folder.

    Raises:
        ValueError: there is no such folder.
    """
    named = {"template": course_root, "solution": course_root / SOLUTIONS}
    root = named.get(choice, Path(choice)).resolve()
    if not root.is_dir():
        raise ValueError(f"--impl {choice}: no such folder; use template, solution or a folder")
    return Submission(root)
