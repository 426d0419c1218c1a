"""Which tasks have a small standard program that shows what their function sends.

``distlab trace`` runs it; ``bodies`` holds what the ranks do. Here is no torch, for
those who only ask.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distlab.learner.folder import LearnerError

BATCH = 64  # images of 8 x 8


@dataclass(frozen=True)
class Program:
    """On how many ranks the picture tells most, and what stands above it."""

    ranks: int
    title: str  # {n} is the number of ranks


PROGRAMS: Mapping[str, Program] = {
    "1.3": Program(4, f"scatter a batch of {BATCH} over {{n}} ranks"),
    "1.4": Program(4, "exchange round a ring of {n}"),
    "1.5": Program(8, "broadcast from rank 0 to {n} ranks"),
    "1.6": Program(4, "naive all-reduce of {n} ranks"),
    "1.7": Program(8, "recursive doubling of {n} ranks"),
    "1.9": Program(4, "parameters to {n} ranks"),
    "1.10": Program(4, "gradients of {n} ranks"),
}


def has_program(task_id: str) -> bool:
    """Whether ``distlab trace`` can draw a task."""
    return task_id in PROGRAMS


def find(task_id: str) -> Program:
    """Return the program of a task.

    Raises:
        LearnerError: it has none; names the tasks that have.
    """
    if not has_program(task_id):
        raise LearnerError(
            f"there is no picture of {task_id}; distlab trace draws {', '.join(PROGRAMS)}"
        )
    return PROGRAMS[task_id]
