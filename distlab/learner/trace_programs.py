"""Small standard programs for ``distlab trace``, which make a task's function send messages.

The code of the programs is in the module ``trace``. This module does not import torch, because some
commands only look up a task.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distlab.course import Task
from distlab.grade.outcomes import Outcome
from distlab.learner import source
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.state import Progress

BATCH = 64  # number of images, of 8 x 8 pixels each
CLUSTER, MIN_RANKS, MAX_RANKS = "laptop", 2, 8


@dataclass(frozen=True)
class Program:
    """A standard program.

    Attributes:
        ranks: Number of ranks that gives the clearest picture.
        title: Title of the picture; {n} is the number of ranks.
        p2p_order: Message order with which the task is also graded, as in ``sim.Options``.
    """

    ranks: int
    title: str
    p2p_order: str = "free"


PROGRAMS: Mapping[str, Program] = {
    "1.5": Program(4, f"scatter a batch of {BATCH} over {{n}} ranks"),
    "1.3": Program(4, "exchange round a ring of {n}", p2p_order="pair"),
    "1.4": Program(8, "broadcast from rank 0 to {n} ranks"),
    "1.6": Program(4, "naive all-reduce of {n} ranks"),
    "1.7": Program(8, "recursive doubling of {n} ranks"),
    "1.9": Program(4, "parameters to {n} ranks"),
    "1.10": Program(4, "gradients of {n} ranks"),
}


def choose(folder: CourseFolder, progress: Progress) -> tuple[Task, str]:
    """Return the task to draw by default, and the reason.

    The default is the last graded task that has a program, or else the first written task that has
    not passed, or else the next task to write.

    Raises:
        LearnerError: No task of this course has a program.
    """
    drawn = [task for task in folder.course.tasks if task.id in PROGRAMS]
    graded = [task for task in progress.graded(folder) if progress.outcome(task) != Outcome.TODO]
    left = [task for task in drawn if not progress.has_passed(task)]
    written = [task for task in left if not source.is_to_write(folder, task)]
    groups = ((graded, "the last one graded"), (written, "which is written"), (left, "the next"))
    for tasks, why in groups:
        for task in tasks:
            if task in drawn:
                return task, why
    raise LearnerError("distlab trace has no picture of any task of this course")


def count(task_id: str, ranks: int | None) -> int:
    """Return the number of ranks for a task's program; None stands for the program's default.

    Raises:
        LearnerError: The task has no program, or the number of ranks is out of range.
    """
    if task_id not in PROGRAMS:
        raise LearnerError(
            f"there is no picture of {task_id}; distlab trace draws {', '.join(PROGRAMS)}"
        )
    number = PROGRAMS[task_id].ranks if ranks is None else ranks
    if not MIN_RANKS <= number <= MAX_RANKS:
        raise LearnerError(
            f"--ranks {number}: the simulated {CLUSTER} has {MIN_RANKS} to {MAX_RANKS}"
        )
    return number
