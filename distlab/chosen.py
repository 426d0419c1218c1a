"""The lessons that ``--impl`` asks for: the solutions, or the learner's own."""

from collections.abc import Collection, Sequence
from types import ModuleType

from distlab import lessons
from distlab.course import FILE as COURSE_FILE
from distlab.course import Task
from distlab.grade import submission
from distlab.grade.submission import Submission
from distlab.learner import folder, source
from distlab.lessons import COURSE, SOLUTIONS
from distlab.util.text import joined

SOLVED = Submission(COURSE / SOLUTIONS, is_solution=True)
CHOICES = ("solution", "mine")
MAX_NAMED = 6  # messages about more tasks than this give only their ids


class NotThereError(Exception):
    """The code to run is unwritten or not in this copy of the course; shown without a traceback."""


def find(impl: str, tasks: Collection[str]) -> Submission:
    """Return the lessons to use; must be called before any processes start.

    Args:
        impl: "solution" or "mine".
        tasks: Ids of the tasks whose functions will be called.

    Raises:
        NotThereError: This copy has no solutions, or one of the tasks is still a TODO.
        LearnerError: ``impl`` is "mine" outside the course's folder.
    """
    if impl == "solution":
        check_solutions()
        return SOLVED
    if missing := unwritten(tasks):
        raise NotThereError(
            f"this needs what you have not written yet: {_listed(missing)}. Go on with: "
            f"distlab check {missing[0].id}"
        )
    return Submission(folder.find().root)


def unwritten(tasks: Collection[str]) -> list[Task]:
    """Return these tasks, and all that they build on, as far as the learner has not written them.

    Raises:
        LearnerError: This is not inside the course's folder.
    """
    here, needed = folder.find(), set[Task]()
    for task in here.course.tasks:
        if task.id in tasks:
            needed.update((task, *here.course.builds_on(task)))
    return [t for t in here.course.tasks if t in needed and not source.is_written(here, t)]


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


def lesson(submitted: Submission, name: str) -> ModuleType:
    """Import a lesson inside a rank.

    Raises:
        LessonError: One of the learner's files cannot be imported.
    """
    if submitted.is_solution:
        return lessons.solution(name)
    return submitted.load(lessons.folder_of(name), name)
