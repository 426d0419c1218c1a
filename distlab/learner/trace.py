"""Draw the messages that a learner's function sends in a small program on simulated ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlab
from distlab import launch
from distlab.course import Task
from distlab.grade.outcomes import verdict_on
from distlab.grade.running import on_rank
from distlab.grade.submission import Submission
from distlab.launch import LaunchError
from distlab.learner import status, trace_programs
from distlab.learner.folder import CourseFolder, WriteError
from distlab.learner.trace_programs import BATCH, CLUSTER
from distlab.sim import Options, Simulated
from distlab.sim.results import diagram
from distlab.sim.results.summary import summary

# Processor time and idle time detect hangs; wall-clock time would mislead on a busy machine.
LIMITS = launch.Limits(timeout_s=300.0, cpu_s=30.0, idle_s=30.0)
OUT = "out"


@dataclass(frozen=True)
class Traced:
    """Result of a run: a summary with a picture, or a report of the error that ended it."""

    text: str
    picture: Path | None = None


def trace(folder: CourseFolder, task: Task, handed_in: Submission, ranks: int) -> Traced:
    """Run the task's program and draw its messages over time.

    Args:
        folder: The course's folder.
        task: Task to draw, one of ``trace_programs.PROGRAMS``.
        handed_in: Files that contain the task's function.
        ranks: Number of ranks, checked by ``trace_programs.count``.

    Raises:
        WriteError: The picture cannot be written.
    """
    program = trace_programs.PROGRAMS[task.id]
    try:
        simulated: Simulated[None] = launch.simulate(
            *(on_rank, ranks, handed_in, task, _run, (task.id,)),
            cluster=CLUSTER,
            options=Options(
                given=(str(Path(distlab.__file__).parent),), p2p_order=program.p2p_order
            ),
            limits=LIMITS,
            plain_results=True,
        )
    except LaunchError as error:
        return Traced(_report(folder, error))
    title = f"Task {task.id}: {program.title.format(n=ranks)}"
    return Traced(summary(simulated), _draw(simulated, title, folder.root / OUT, task))


def _draw(simulated: Simulated[None], title: str, parent: Path, task: Task) -> Path:
    path = parent / f"trace-{task.id}.png"
    try:
        parent.mkdir(exist_ok=True)
        diagram.space_time(simulated, title).savefig(path)
    except OSError as error:
        raise WriteError(f"the picture {path}: {error.strerror or error}") from None
    return path


def _report(folder: CourseFolder, error: LaunchError) -> str:
    """Return the grader's message about a failed run, or one line about an unwritten function."""
    verdict = verdict_on(error)
    if verdict.missing:
        return status.not_written(folder.task(verdict.missing[0]))
    return f"{verdict.message}\n{verdict.details}".rstrip()


# The programs that every rank runs with the learner's lesson

NUMBERS = 65_994  # float32 elements in the gradient of the CNN that Phase 1 trains


def _mine() -> Tensor:
    return torch.full((NUMBERS,), float(dist.get_rank()))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(BATCH, 1, 8, 8), torch.zeros(BATCH, dtype=torch.int64)


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10))


def _average_two_layers(lesson: Any) -> None:
    module = _two_layers()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    lesson.average_gradients(module)


def _exchange_round_a_ring(lesson: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lesson.exchange(_mine(), (rank + 1) % size, _mine(), (rank - 1) % size)


def _run(lesson: Any, task_id: str) -> None:
    """Run a program on a rank, and discard the result of the learner's function."""
    BODIES[task_id](lesson)


BODIES: Mapping[str, Callable[[Any], object]] = {
    "1.5": lambda lesson: lesson.scatter_batch(_batch() if dist.get_rank() == 0 else None),
    "1.3": _exchange_round_a_ring,
    "1.4": lambda lesson: lesson.broadcast(_mine(), 0),
    "1.6": lambda lesson: lesson.all_reduce_naive(_mine()),
    "1.7": lambda lesson: lesson.all_reduce_recursive_doubling(_mine()),
    "1.9": lambda lesson: lesson.broadcast_parameters(_two_layers()),
    "1.10": _average_two_layers,
}
