"""Which tasks have a small standard program that shows what their function sends.

``distlab trace`` runs it; ``trace_bodies`` holds what the ranks do. Here is no torch, for
those who only ask.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distlab.course import TODO, Task
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.state import Progress

BATCH = 64  # images of 8 x 8
CLUSTER, MIN_RANKS, MAX_RANKS = "laptop", 2, 8


@dataclass(frozen=True)
class Program:
    """On how many ranks the picture tells most, what stands above it, and the order of messages."""

    ranks: int
    title: str  # {n} is the number of ranks
    p2p_order: str = "free"  # as the task is judged: see sim.Options


PROGRAMS: Mapping[str, Program] = {
    "1.3": Program(4, f"scatter a batch of {BATCH} over {{n}} ranks"),
    "1.4": Program(4, "exchange round a ring of {n}", p2p_order="pair"),
    "1.5": Program(8, "broadcast from rank 0 to {n} ranks"),
    "1.6": Program(4, "naive all-reduce of {n} ranks"),
    "1.7": Program(8, "recursive doubling of {n} ranks"),
    "1.9": Program(4, "parameters to {n} ranks"),
    "1.10": Program(4, "gradients of {n} ranks"),
}


def choose(folder: CourseFolder, progress: Progress) -> Task:
    """Return the task to draw by default: the last one that was graded, or else the next one.

    Raises:
        LearnerError: neither has a program; names the tasks that have.
    """
    written = [task for task in progress.graded(folder) if progress.outcome(task) != TODO]
    following = progress.next_task(folder)
    for task in [*written, *([following] if following else [])]:
        if task.id in PROGRAMS:
            return task
    raise LearnerError(f"which task? distlab trace draws {', '.join(PROGRAMS)}")


def count(task_id: str, ranks: int | None) -> int:
    """Return on how many ranks to run a task's program, by default its own number.

    Raises:
        LearnerError: it has none, and who has; or not for so many.
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
