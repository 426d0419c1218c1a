"""The learner's progress by task id, in .distlab/progress.json.

The file only shows where to continue. Scores come only from ``distlab grade``.
"""

import contextlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distlab.course import HINTS, Task
from distlab.grade.checks import TooDear
from distlab.grade.outcomes import Outcome
from distlab.grade.results import TaskResult
from distlab.learner import source
from distlab.learner.folder import CourseFolder
from distlab.util import files

FILE = "progress.json"
EDITION = 2  # of the course: a file of another edition numbers its tasks otherwise
MAX_BYTES = 2**20


@dataclass(frozen=True)
class Record:
    """The last outcome of a task, and the digest of the functions that were graded."""

    outcome: str
    digest: str = ""
    is_too_dear: bool = False  # True if it failed by its costs alone
    earned: int = 0  # points that it scored although it failed


@dataclass
class Progress:
    """Recorded outcomes, in the order of grading, and hints shown; both by task id.

    Attributes:
        problem: Reason why the file could not be written, or "".
    """

    path: Path
    records: dict[str, Record] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)  # last level that was shown
    problem: str = ""

    def outcome(self, task: Task) -> str:
        """Return the last outcome of the task; "" if it was never graded."""
        record = self.records.get(task.id)
        return record.outcome if record else ""

    def outcome_name(self, task: Task) -> str:
        """Return the last outcome in the words of the grader's table; "" as for ``outcome``."""
        return TooDear.kind if self._is_too_dear(task) else self.outcome(task)

    def points(self, task: Task) -> int:
        """Return the points that the task scored when it was last graded."""
        if self.has_passed(task):
            return task.points
        return min(self.records[task.id].earned, task.points) if task.id in self.records else 0

    def _is_too_dear(self, task: Task) -> bool:
        return task.id in self.records and self.records[task.id].is_too_dear

    def has_passed(self, task: Task) -> bool:
        """Return True if the task passed when it was last graded."""
        return self.outcome(task) == Outcome.PASSED

    def is_edited(self, folder: CourseFolder, task: Task) -> bool:
        """Return True if the learner's file has changed since the task was last graded."""
        record = self.records.get(task.id)
        if record is None or not record.digest:
            return False
        return record.digest != source.digest(folder, task)

    def graded(self, folder: CourseFolder) -> list[Task]:
        """Return the graded tasks, most recent first."""
        return [folder.task(task_id) for task_id in reversed(self.records)]

    def last_passed(self, folder: CourseFolder) -> Task | None:
        """Return the passed task that was graded most recently, if any."""
        return next(filter(self.has_passed, self.graded(folder)), None)

    def next_task(self, folder: CourseFolder, after: Task | None = None) -> Task | None:
        """Return the first task that has not passed, starting after ``after``.

        If ``after`` is None, start after the last passed task. At the end of a phase, its earlier
        tasks come next, then those of other phases.
        """
        last = after or self.last_passed(folder)
        tasks = folder.phase_of(last).tasks if last else ()
        start = tasks.index(last) + 1 if last else 0
        in_turn = [*tasks[start:], *tasks[:start], *folder.course.tasks]
        return next((task for task in in_turn if not self.has_passed(task)), None)

    def save(self) -> None:
        """Write the file atomically, or set ``problem`` if that fails."""
        records = {task_id: asdict(record) for task_id, record in self.records.items()}
        tables = {"edition": EDITION, "tasks": records, "hints": self.hints}
        text = json.dumps(tables, indent=2) + "\n"
        try:
            self.path.parent.mkdir(exist_ok=True)
            files.write_whole(self.path, text.encode())
        except OSError as error:
            reason = error.strerror or error
            self.problem = f"your progress cannot be kept in {self.path.parent}: {reason}"


def load(folder: CourseFolder) -> Progress:
    """Read the progress from its file, dropping invalid entries and those of other editions."""
    progress = Progress(folder.private / FILE)
    tables: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        tables = json.loads(files.read_regular(progress.path, MAX_BYTES))
    is_current = isinstance(tables, dict) and tables.get("edition") == EDITION
    tasks = {task.id for task in folder.course.tasks} if is_current else set[str]()
    for id, record in _entries(tables, "tasks", tasks):
        if isinstance(record, dict) and record.get("outcome") in list(Outcome):
            is_too_dear = record.get("is_too_dear") is True
            digest = str(record.get("digest", ""))
            earned = record.get("earned")
            earned = earned if type(earned) is int and earned >= 0 else 0
            progress.records[id] = Record(record["outcome"], digest, is_too_dear, earned)
    for id, level in _entries(tables, "hints", tasks):
        if type(level) is int and level in HINTS:
            progress.hints[id] = level
    return progress


def _entries(tables: Any, table: str, keys: Container[str]) -> list[tuple[str, Any]]:
    """Return those entries of a table that have one of these keys, in the table's order."""
    entries = tables.get(table) if isinstance(tables, dict) else None
    return (
        [entry for entry in entries.items() if entry[0] in keys]
        if isinstance(entries, dict)
        else []
    )


def remember(
    folder: CourseFolder, records: Mapping[str, Record], waiting: Container[str] = ()
) -> Progress:
    """Add records to the file, which another process may have changed in the meantime.

    If only one task was graded, its record moves to the end. If several were, only records that
    changed move, because grading everything does not show which task the learner is working on.

    Args:
        folder: The course's folder.
        records: Records by task id.
        waiting: Ids of tasks that could not be judged, because an earlier task is not written yet.
            If the same code has passed before with ``--lend``, it still counts as passed.
    """
    progress = load(folder)
    for task_id, record in records.items():
        has_passed = progress.records.get(task_id) == Record(Outcome.PASSED.value, record.digest)
        if task_id in waiting and record.digest and has_passed:
            continue
        if len(records) == 1 or progress.records.get(task_id) != record:
            progress.records.pop(task_id, None)
            progress.records[task_id] = record
    progress.save()
    return progress


def remember_results(
    folder: CourseFolder, results: Iterable[TaskResult], digests: Mapping[str, str]
) -> Progress:
    """Add the outcomes of grading the learner's files.

    A task is left out if none of its tests ran, or if the tests passed but not all of them ran.
    """
    judged = [result for result in results if result.tests]
    records = {
        result.task.id: Record(
            *(result.outcome.value, digests.get(result.task.id, ""), result.is_too_dear),
            earned=0 if result.has_passed else result.points,
        )
        for result in judged
        if result.is_complete or result.outcome is not Outcome.PASSED
    }
    return remember(folder, records, {result.task.id for result in judged if result.is_waiting})
