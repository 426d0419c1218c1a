"""Whose trainer trains: the solution's, or the learner's own."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab.course import Task
from distlab.grade import submission
from distlab.grade.lending import SOLUTIONS
from distlab.grade.submission import COURSE, Submission
from distlab.learner import folder, source

PHASE = "phase1_data_parallel"
TRAINER_TASK = "1.13"
SOLVED = Submission(COURSE / SOLUTIONS, is_solution=True)
CHOICES = ("solution", "mine")


class NotThereError(Exception):
    """What should train is not written, or not in this copy of the course; one line."""


@dataclass(frozen=True)
class Parts:
    """What a training is made of."""

    trainer: Any  # the class Trainer
    all_reduces: Mapping[str, Any]
    averages: Mapping[str, Any]


def find(impl: str, all_reduce: str) -> Submission:
    """Return whose files train, before anything is started.

    Args:
        impl: "solution" or "mine".
        all_reduce: the strategy that will sum the gradients.

    Raises:
        NotThereError: this copy has no solutions, or a task that the training needs is a TODO.
        LearnerError: "mine" outside of the course's folder.
    """
    if impl == "solution":
        check_solutions()
        return SOLVED
    here = folder.find()
    missing = [task for task in _needed(here, all_reduce) if source.is_to_write(here, task)]
    if missing:
        first, names = missing[0], ", ".join(f"{task.id} {task.function}" for task in missing)
        raise NotThereError(
            f"your trainer needs what is not written yet: {names}. Go on with: "
            f"distlab check {first.id}"
        )
    return Submission(here.root)


def _needed(here: folder.CourseFolder, all_reduce: str) -> list[Task]:
    """Return the tasks that a training calls, in order."""
    last = here.course.task(TRAINER_TASK)
    summing = [task for task in here.course.tasks if f"all_reduce_{all_reduce}" in task.functions]
    chosen = {last, *here.course.builds_on(last), *summing}
    for task in summing:
        chosen.update(here.course.builds_on(task))
    return [task for task in here.course.tasks if task in chosen]


def check_solutions() -> None:
    """Refuse what needs the solutions in a copy of the course that comes without.

    Raises:
        NotThereError: with what works there.
    """
    if submission.reference(COURSE) is None:
        raise NotThereError(
            f"this copy of the course has no {SOLUTIONS}/: distlab train --impl mine trains with "
            "what you have written"
        )


def load(lessons: Submission) -> Parts:
    """Import the parts, inside a rank.

    Raises:
        LessonError: a file of the learner's cannot be imported.
    """
    trainer, collectives = _module(lessons, "trainer"), _module(lessons, "collectives")
    return Parts(trainer.Trainer, collectives.ALL_REDUCES, trainer.AVERAGE_GRADIENTS)


def _module(lessons: Submission, lesson: str) -> ModuleType:
    if lessons.is_solution:
        return importlib.import_module(f"{SOLUTIONS}.{PHASE}.{lesson}")
    return lessons.load(PHASE, lesson)
