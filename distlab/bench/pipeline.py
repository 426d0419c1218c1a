"""The pipelines of Phase 2 beside ``torch.distributed.pipelining``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distlab import chosen, launch
from distlab import lessons as course
from distlab.bench import rivals
from distlab.bench.rivals import Contestant, Measured
from distlab.grade.submission import Submission

if TYPE_CHECKING:
    from distlab.production.types import Batch

TASKS = ("2.10", "2.11", "2.12")
RIVALS = {"torch's ScheduleGPipe": "GPipe", "torch's Schedule1F1B": "1F1B"}
MICRO_BATCHES_PER_STAGE = 2


class Sizes(NamedTuple):
    """A micro-batch is (rows, positions, width); a stage is a number of a transformer's blocks."""

    rows: int = 4
    positions: int = 64
    width: int = 128
    heads: int = 4
    blocks: int = 1
    classes: int = 10


SIZES = Sizes()


def print_table(ranks: int, repeats: int, impl: str) -> None:
    """Measure GPipe and 1F1B, ours and torch's; print times and memory of a step.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed, or ours computes something else than torch's.
    """
    lessons = chosen.find(impl, TASKS)
    measured, *_ = launch.run(measure_on_rank, ranks, lessons, SIZES, repeats, backend="gloo")
    num_micro_batches = MICRO_BATCHES_PER_STAGE * ranks
    title = f"{ranks} stages, {num_micro_batches} micro-batches: median of {repeats} steps"
    Console().print(rivals.table(title, measured, RIVALS, (rivals.STEP, rivals.PEAK)))
    print(rivals.WHOSE[impl], rivals.PARENTHESES, rivals.PEAK_MEMORY, sep="\n")


def measure_on_rank(lessons: Submission, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Measure GPipe and 1F1B, ours and torch's, with this rank as a stage."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    lesson: Any = chosen.lesson(lessons, "pipeline_parallel")
    num_stages = dist.get_world_size()
    num_micro_batches = MICRO_BATCHES_PER_STAGE * num_stages
    stage, batch = _stage(sizes), _batch(sizes, num_micro_batches)
    contestants = {}
    for (rival, ours), write, make in zip(
        RIVALS.items(),
        (lesson.gpipe_schedule, lesson.one_f_one_b_schedule),
        (ScheduleGPipe, Schedule1F1B),
        strict=True,
    ):
        schedule = write(num_stages, num_micro_batches)
        contestants[ours] = _ours(lesson.run_schedule, schedule, copy.deepcopy(stage), batch)
        contestants[rival] = _torchs(make, copy.deepcopy(stage), batch, num_micro_batches)
    return rivals.measure(contestants, RIVALS, repeats)


def _stage(sizes: Sizes) -> nn.Sequential:
    """Return this rank's part of the model; the last one ends with the logits."""
    torch.manual_seed(dist.get_rank())
    stage = nn.Sequential(
        *(course.given_2.Block(sizes.width, sizes.heads) for _ in range(sizes.blocks))
    )
    if dist.get_rank() == dist.get_world_size() - 1:
        stage.append(nn.Linear(sizes.width, sizes.classes))
    return stage


def _batch(sizes: Sizes, num_micro_batches: int) -> Batch:
    """Return inputs and targets, the same on all ranks."""
    torch.manual_seed(0)
    positions = sizes.rows * num_micro_batches, sizes.positions
    return torch.randn(*positions, sizes.width), torch.randint(sizes.classes, positions)


def _ours(run: Any, schedule: Any, stage: nn.Module, batch: Batch) -> Contestant:
    num_micro_batches = len(schedule[0]) // 2

    def step() -> float:
        parts = (x.chunk(num_micro_batches) for x in batch)
        loss: float = run(
            schedule, [stage], list(zip(*parts, strict=True)), course.given_2.cross_entropy_sum
        )
        return loss

    return Contestant(stage, step)


def _torchs(
    make: Callable[..., Any], stage: nn.Module, batch: Batch, num_micro_batches: int
) -> Contestant:
    from torch.distributed.pipelining import PipelineStage

    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_stages - 1
    staged = PipelineStage(stage, rank, num_stages, torch.device("cpu"))
    schedule = make(staged, num_micro_batches, loss_fn=_mean_loss)
    inputs, target = batch[:1] if rank == 0 else (), batch[1] if is_last else None

    def step() -> float | None:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item() if is_last else None

    return Contestant(stage, step)


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), targets.flatten())
