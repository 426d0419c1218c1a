"""What a learner has done, by task id, in .distlab/progress.json.

It only says where to go on. It is never trusted: whoever wants a score runs ``distlab grade``.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distlab.course import HINTS, OUTCOMES, PASSED, Task
from distlab.learner import files
from distlab.learner.folder import CourseFolder

FILE = "progress.json"


@dataclass(frozen=True)
class Record:
    """What the last grading of a task said."""

    outcome: str
    digest: str = ""  # of the functions that were graded


@dataclass
class Progress:
    """Records and hints that were shown, by task id."""

    path: Path
    records: dict[str, Record] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)  # the last level shown

    def outcome(self, task: Task) -> str:
        """Return the last outcome, "" if it was never graded."""
        record = self.records.get(task.id)
        return record.outcome if record else ""

    def has_passed(self, task: Task) -> bool:
        """Whether the task passed when it was last graded."""
        return self.outcome(task) == PASSED

    def next_task(self, folder: CourseFolder, after: Task | None = None) -> Task | None:
        """Return the first task that has not passed, of those after ``after`` if there is one."""
        tasks = list(folder.course.tasks)
        start = tasks.index(after) + 1 if after else 0
        in_turn = tasks[start:] + tasks[:start]
        return next((task for task in in_turn if not self.has_passed(task)), None)

    def save(self) -> None:
        """Write the file; one that reads it meanwhile gets the old one or the new one."""
        self.path.parent.mkdir(exist_ok=True)
        records = {task_id: asdict(record) for task_id, record in self.records.items()}
        text = json.dumps({"tasks": records, "hints": self.hints}, indent=2) + "\n"
        files.write(self.path, text.encode())


def load(folder: CourseFolder) -> Progress:
    """Read what is remembered; whatever makes no sense is forgotten."""
    progress = Progress(folder.private / FILE)
    tables: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        tables = json.loads(progress.path.read_text(encoding="utf-8"))
    for task in folder.course.tasks:
        record, level = _entry(tables, "tasks", task.id), _entry(tables, "hints", task.id)
        if isinstance(record, dict) and record.get("outcome") in (PASSED, *OUTCOMES):
            progress.records[task.id] = Record(record["outcome"], str(record.get("digest", "")))
        if type(level) is int and level in HINTS:
            progress.hints[task.id] = level
    return progress


def _entry(tables: Any, table: str, key: str) -> Any:
    entries = tables.get(table) if isinstance(tables, dict) else None
    return entries.get(key) if isinstance(entries, dict) else None


def remember(folder: CourseFolder, records: Mapping[str, Record]) -> Progress:
    """Add what a grading said to what others have written meanwhile."""
    progress = load(folder)
    progress.records.update(records)
    progress.save()
    return progress
