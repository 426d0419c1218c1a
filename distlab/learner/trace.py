"""A learner's function in the simulated world, on a small standard program, as a picture."""

from dataclasses import dataclass
from pathlib import Path

from distlab import launch
from distlab.course import Task
from distlab.grade import submission
from distlab.grade.running import on_rank
from distlab.launch import LaunchError
from distlab.learner import programs
from distlab.learner.bodies import BODIES
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.sim import Simulated, diagram
from distlab.sim.summary import summary

CLUSTER, MAX_RANKS = "laptop", 8
TIMEOUT_S = 30.0
OUT = "out"


@dataclass(frozen=True)
class Traced:
    """What a run gave: a picture, or the report of what ended it."""

    text: str
    picture: Path | None = None


def trace(folder: CourseFolder, task: Task, impl: str, ranks: int | None) -> Traced:
    """Run the task's program and draw who did what when.

    Args:
        folder: the course's.
        task: one that sends messages.
        impl: "template", "solution" or a folder.
        ranks: 2 to 8; the program's own number by default.

    Raises:
        LearnerError: there is no program for this task, or not for so many ranks; no phase in the
            folder.
    """
    program = programs.find(task.id)
    count = program.ranks if ranks is None else ranks
    if not 2 <= count <= MAX_RANKS:
        raise LearnerError(f"--ranks {count}: the simulated {CLUSTER} has 2 to {MAX_RANKS}")
    try:
        handed_in = submission.find(impl, folder.root)
    except ValueError as error:
        raise LearnerError(str(error)) from None
    try:
        simulated: Simulated[None] = launch.simulate(
            *(on_rank, count, handed_in, task, BODIES[task.id], ()),
            cluster=CLUSTER,
            timeout_s=TIMEOUT_S,
            plain_results=True,
        )
    except LaunchError as error:
        return Traced(_report(error))
    title = f"Task {task.id}: {program.title.format(n=count)}"
    return Traced(summary(simulated), _draw(simulated, title, folder.root / OUT, task))


def _draw(simulated: Simulated[None], title: str, parent: Path, task: Task) -> Path:
    parent.mkdir(exist_ok=True)
    path = parent / f"trace-{task.id}.png"
    diagram.space_time(simulated, title).savefig(path)
    return path


def _report(error: LaunchError) -> str:
    """Say what ended the run; for what is not written yet, in a line."""
    text = str(error)
    if error.exception in ("NotImplementedError", "LessonError"):
        headline = text.partition("\n")[0]
        return headline.partition(f"{error.exception}: ")[2] or headline
    return text
