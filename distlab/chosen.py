"""The lessons that ``--impl`` asks for: the solutions, or the learner's own."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab import lessons
from distlab.course import FILE as COURSE_FILE
from distlab.course import Task
from distlab.grade import submission
from distlab.grade.submission import Submission
from distlab.learner import folder, source
from distlab.lessons import COURSE, SOLUTIONS
from distlab.util.text import joined

TRAINER_TASK = "1.13"
SOLVED = Submission(COURSE / SOLUTIONS, is_solution=True)
CHOICES = ("solution", "mine")
MAX_NAMED = 6  # messages about more tasks than this give only their ids


class NotThereError(Exception):
    """The code to run is unwritten or not in this copy of the course; shown without a traceback."""


@dataclass(frozen=True)
class Parts:
    """The class and the functions from Phase 1 that a training run uses."""

    trainer: Any  # the class ``Trainer``
    all_reduces: Mapping[str, Any]
    averages: Mapping[str, Any]


def find(impl: str, tasks: Collection[str]) -> Submission:
    """Return the lessons to use; must be called before any processes start.

    Args:
        impl: "solution" or "mine".
        tasks: Ids of the tasks whose functions will be called.

    Raises:
        NotThereError: This copy has no solutions, or one of the tasks is still a TODO.
        LearnerError: ``impl`` is "mine" outside the course's folder.
    """
    return _of(impl, lambda task: task.id in tasks)


def find_trainer(impl: str, all_reduce: str, also: Collection[str] = ()) -> Submission:
    """Return the lessons for training with Phase 1's trainer; raise the same errors as ``find``.

    Args:
        impl: "solution" or "mine".
        all_reduce: Name of the all-reduce that will sum the gradients.
        also: Names of further functions that the training run calls.
    """
    called = {f"all_reduce_{all_reduce}", *also}
    return _of(impl, lambda task: task.id == TRAINER_TASK or not called.isdisjoint(task.functions))


def _of(impl: str, is_called: Callable[[Task], bool]) -> Submission:
    if impl == "solution":
        check_solutions()
        return SOLVED
    here = folder.find()
    needed = _with_their_basis(here, filter(is_called, here.course.tasks))
    missing = [task for task in needed if source.is_to_write(here, task)]
    if missing:
        raise NotThereError(
            f"this needs what you have not written yet: {_listed(missing)}. Go on with: "
            f"distlab check {missing[0].id}"
        )
    return Submission(here.root)


def _with_their_basis(here: folder.CourseFolder, tasks: Iterable[Task]) -> list[Task]:
    """Return these tasks and all tasks that they build on, in the course's order."""
    chosen: set[Task] = set()
    for task in tasks:
        chosen.update((task, *here.course.builds_on(task)))
    return [task for task in here.course.tasks if task in chosen]


def _listed(tasks: Sequence[Task]) -> str:
    """List tasks, as in ``1.9 broadcast_parameters, 1.11 train_step``; if many, only their ids."""
    if len(tasks) > MAX_NAMED:
        return f"the {len(tasks)} tasks {joined([task.id for task in tasks])}"
    return ", ".join(f"{task.id} {joined(task.names)}" for task in tasks)


def check_solutions(instead: str = "--impl mine takes what you have written") -> None:
    """Check that this copy of the course has the solutions.

    Args:
        instead: Advice on what works without them.

    Raises:
        NotThereError: The course or its solutions are missing; the message says what to do.
    """
    if not (COURSE / COURSE_FILE).exists():
        raise NotThereError(
            "distlab is installed without the course, whose trainer this runs: in a copy of the "
            "course, pip install --editable ."
        )
    if submission.reference(COURSE) is None:
        raise NotThereError(f"this copy of the course has no {SOLUTIONS}/: {instead}")


def load(submitted: Submission) -> Parts:
    """Import the parts of a training run inside a rank; raise the same errors as ``lesson``."""
    trainer, collectives = lesson(submitted, "trainer"), lesson(submitted, "collectives")
    return Parts(trainer.Trainer, collectives.ALL_REDUCES, trainer.AVERAGE_GRADIENTS)


def lesson(submitted: Submission, name: str) -> ModuleType:
    """Import a lesson inside a rank.

    Raises:
        LessonError: One of the learner's files cannot be imported.
    """
    if submitted.is_solution:
        return lessons.solution(name)
    return submitted.load(lessons.folder_of(name), name)
