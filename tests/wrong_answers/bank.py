"""Banks of answers, known to be wrong or right but unusual, stored as changes to the solutions.

A file of a bank, ``phase1/1_4.toml``, holds the answers to one task:

    [wrong.wrecks_outgoing]                 # or [right.NAME]
    says = "It overwrites outgoing, which is the caller's."
    rejected_by = "test_a_ring_exchanges_without_deadlock"
    outcome = "failed"                      # of that test; optional
    phrase = "only incoming is written"     # part of its message
    change = '''
         work.wait()
    +    outgoing.zero_()
    '''

``change`` is a diff of the solution; a line ``@@`` separates hunks. The old lines of a hunk, which
begin with a blank or ``-``, must occur exactly once in the solution. Instead of a change, an answer
may have ``whole``: code that is appended to the lesson, and whose definitions override earlier
ones. Right answers name no test, and neither do the answers of a bank whose authors have not seen
the tests.
"""

import ast
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from own_phases import shipped

from distlab import course
from distlab.course import Task
from distlab.grade.submission import Submission
from wrong_answers.changes import BankError, changed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
OWN = Path(__file__).parent
EQUIVALENTS = OWN / "equivalent_mutants.toml"
COURSE = shipped(course.load(ROOT))


@dataclass(frozen=True)
class Answer:
    """One answer to one task."""

    task: Task
    name: str
    is_right: bool
    says: str  # description of the mistake, or of what is unusual
    rejected_by: str = ""  # the test that must reject it
    outcome: str = "failed"  # expected outcome of this test
    phrase: str = ""  # part of the message expected from it
    change: str = ""
    whole: str = ""

    @property
    def id(self) -> str:
        """The task and the name, as in ``1.3 all_send_first``."""
        return f"{self.task.id} {self.name}"

    def lesson(self) -> str:
        """Return the text of the lesson that contains this answer.

        Raises:
            BankError: The change does not fit the solution, or the result does not parse.
        """
        solution = (ROOT / self.task.solution).read_text(encoding="utf-8")
        try:
            text = f"{solution}\n\n{self.whole}" if self.whole else changed(solution, self.change)
            ast.parse(text)
        except (BankError, SyntaxError) as error:
            raise BankError(f"{self.id}: {error}") from None
        return text


def load(bank: Path) -> list[Answer]:
    """Read a bank, in the order of the course's tasks; a task without a file has no answers.

    Raises:
        BankError, CourseError: A file belongs to no task, or an entry is not an answer.
    """
    files = {COURSE.task(file.stem.replace("_", ".")): file for file in bank.glob("phase*/*.toml")}
    for task, file in files.items():
        if file.parent.name != f"phase{task.id.partition('.')[0]}":
            raise BankError(f"{file}: task {task.id} belongs to another phase")
    return [
        answer for task in COURSE.tasks if task in files for answer in _answers(task, files[task])
    ]


def path_of(bank: Path, task: Task) -> Path:
    """Return the file of a bank that holds the answers to a task."""
    return bank / f"phase{task.id.partition('.')[0]}" / f"{task.id.replace('.', '_')}.toml"


def load_equivalents() -> list[Answer]:
    """Read the mutants that no test can tell from the solution; tables are ``["1.4".NAME]``."""
    return [
        _answer(COURSE.task(id), name, True, entry)
        for id, entries in _tables(EQUIVALENTS).items()
        for name, entry in entries.items()
    ]


def _answers(task: Task, file: Path) -> Iterator[Answer]:
    for kind, entries in _tables(file).items():
        if kind not in ("wrong", "right"):
            raise BankError(f"{file}: [{kind}.…] should be [wrong.…] or [right.…]")
        for name, entry in entries.items():
            yield _answer(task, name, kind == "right", entry)


def _tables(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise BankError(f"{file}: {error}") from None


def _answer(task: Task, name: str, is_right: bool, entry: dict[str, Any]) -> Answer:
    _check_keys(f"{task.id} {name}", entry)
    return Answer(task, name, is_right, **entry)


def _check_keys(where: str, entry: dict[str, Any]) -> None:
    known = {field.name for field in fields(Answer)} - {"task", "name", "is_right"}
    if unknown := entry.keys() - known:
        raise BankError(f"{where}: unknown key {', '.join(sorted(unknown))}")
    if "says" not in entry or ("change" in entry) == ("whole" in entry):
        raise BankError(f"{where}: needs says, and either change or whole")


def hand_in(task: Task, lesson: str, folder: Path) -> Submission:
    """Build a submission: the phase's solutions, with ``lesson`` in place of the task's lesson."""
    phase = folder / task.folder
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / task.solution.parent, phase, ignore=ignored)
    (phase / f"{task.lesson}.py").write_text(lesson, encoding="utf-8")
    for file in phase.glob("*.py"):
        text = file.read_text(encoding="utf-8").replace(f"solutions.{task.folder}", task.folder)
        file.write_text(text.replace("from solutions import", "import"), encoding="utf-8")
    return Submission(folder)
