"""Whose trainer trains: the solution's, or the learner's own."""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab.course import FILE as COURSE_FILE
from distlab.course import Task
from distlab.grade import submission
from distlab.grade.lending import SOLUTIONS
from distlab.grade.submission import COURSE, Submission
from distlab.learner import folder, source
from distlab.util.text import joined

PHASE = "phase1_data_parallel"
PHASE_2 = "phase2_advanced"
PHASE_3 = "phase3_multi_node"
TRAINER_TASK = "1.13"
SOLVED = Submission(COURSE / SOLUTIONS, is_solution=True)
CHOICES = ("solution", "mine")
MAX_NAMED = 6  # tasks


class NotThereError(Exception):
    """What should train is not written, or not in this copy of the course; one line."""


@dataclass(frozen=True)
class Parts:
    """What a training is made of."""

    trainer: Any  # the class Trainer
    all_reduces: Mapping[str, Any]
    averages: Mapping[str, Any]


def find(impl: str, all_reduce: str, also: Collection[str] = ()) -> Submission:
    """Return whose files train, before anything is started.

    Args:
        impl: "solution" or "mine".
        all_reduce: the strategy that will sum the gradients.
        also: further functions that the training calls.

    Raises:
        NotThereError: this copy has no solutions, or a task that the training needs is a TODO.
        LearnerError: "mine" outside of the course's folder.
    """
    called = {f"all_reduce_{all_reduce}", *also}
    return _of(impl, lambda task: task.id == TRAINER_TASK or not called.isdisjoint(task.functions))


def find_measurement(impl: str, task_ids: Collection[str]) -> Submission:
    """Return whose functions are measured, before anything is started.

    Args:
        impl: "solution" or "mine".
        task_ids: of the tasks whose functions are measured, or measure.

    Raises:
        NotThereError: this copy has no solutions, or a task that is measured is a TODO.
        LearnerError: "mine" outside of the course's folder.
    """
    return _of(impl, lambda task: task.id in task_ids)


def _of(impl: str, is_called: Callable[[Task], bool]) -> Submission:
    if impl == "solution":
        check_solutions()
        return SOLVED
    here = folder.find()
    needed = _with_what_they_use(here, filter(is_called, here.course.tasks))
    missing = [task for task in needed if source.is_to_write(here, task)]
    if missing:
        raise NotThereError(
            f"this needs what you have not written yet: {_listed(missing)}. Go on with: "
            f"distlab check {missing[0].id}"
        )
    return Submission(here.root)


def _with_what_they_use(here: folder.CourseFolder, tasks: Iterable[Task]) -> list[Task]:
    """Return tasks and those that they build on, in order."""
    chosen: set[Task] = set()
    for task in tasks:
        chosen.update((task, *here.course.builds_on(task)))
    return [task for task in here.course.tasks if task in chosen]


def _listed(tasks: Sequence[Task]) -> str:
    """Write ``1.9 broadcast_parameters, 1.11 train_step``; of many tasks the numbers alone."""
    if len(tasks) > MAX_NAMED:
        return f"the {len(tasks)} tasks {joined([task.id for task in tasks])}"
    return ", ".join(f"{task.id} {joined(task.names)}" for task in tasks)


def check_solutions() -> None:
    """Refuse what needs the solutions in a copy of the course that comes without.

    Raises:
        NotThereError: with what works there.
    """
    if not (COURSE / COURSE_FILE).exists():
        raise NotThereError(
            "distlab is installed without the course, whose trainer this runs: in a copy of the "
            "course, pip install --editable ."
        )
    if submission.reference(COURSE) is None:
        raise NotThereError(
            f"this copy of the course has no {SOLUTIONS}/: --impl mine takes what you have written"
        )


def load(lessons: Submission) -> Parts:
    """Import the parts, inside a rank.

    Raises:
        LessonError: a file of the learner's cannot be imported.
    """
    trainer, collectives = lesson(lessons, "trainer"), lesson(lessons, "collectives")
    return Parts(trainer.Trainer, collectives.ALL_REDUCES, trainer.AVERAGE_GRADIENTS)


def lesson(lessons: Submission, name: str, phase: str = PHASE) -> ModuleType:
    """Import a lesson, inside a rank.

    Raises:
        LessonError: a file of the learner's cannot be imported.
    """
    if lessons.is_solution:
        return importlib.import_module(f"{SOLUTIONS}.{phase}.{name}")
    return lessons.load(phase, name)
