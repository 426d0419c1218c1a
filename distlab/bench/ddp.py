"""The three stages of data parallelism of Phase 3 beside torch's DistributedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from distlab import chosen, launch
from distlab.bench import rivals, rivals_record
from distlab.bench.rivals import Contestant, Measured
from distlab.grade.submission import Submission
from distlab.util.text import counted

TASKS = ("3.12",)
OURS, FLAT, PER_PARAMETER, TORCHS = "ours", "one flat all-reduce", "one per parameter", "torch's"
COLUMNS = (rivals.STEP, rivals.COLLECTIVES, rivals.BYTES, rivals.PEAK)
RIVALS = {FLAT: OURS, PER_PARAMETER: OURS, TORCHS: OURS}
STAGES = """\
Flat: all gradients are summed after the backward pass. Per parameter: each is summed in its hook.
Torch's: DistributedDataParallel with the same limits and gradient_as_bucket_view. Collectives are
those of the second step, in which torch's ranks also agree on new buckets."""


class Sizes(NamedTuple):
    """Of a deep network: pairs of a linear layer and a normalisation, in buckets of so many MiB."""

    rows: int = 64
    width: int = 512
    layers: int = 24
    bucket_mib: float = 4.0


SIZES = Sizes()


def print_table(ranks: int, repeats: int, impl: str, folder: Path | None = None) -> None:
    """Train a model in all four ways; print, and if wanted save, what a step needs.

    Args:
        ranks: one or more.
        repeats: timed steps of each way.
        impl: "solution" or "mine".
        folder: where to save all figures and a picture.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed, or ours computes something else than torch's.
    """
    lessons = chosen.find(impl, TASKS)
    measured, *_ = launch.run(measure_on_rank, ranks, lessons, SIZES, repeats, backend="gloo")
    where = f"{counted(4 * SIZES.layers, 'parameter')} on {counted(ranks, 'gloo rank')}"
    title = f"{where}: median of {repeats} steps"
    Console().print(rivals.table(title, measured, RIVALS, COLUMNS))
    print(rivals.WHOSE[impl], STAGES, rivals.PARENTHESES, rivals.PEAK_MEMORY, sep="\n")
    if folder is not None:
        arguments = {"ranks": ranks, "repeats": repeats, "impl": impl, **SIZES._asdict()}
        rivals_record.save(folder, "ddp", title, measured, RIVALS, COLUMNS, arguments)


def measure_on_rank(lessons: Submission, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Measure the three stages and torch's, all with one model and batch of this rank."""
    lesson: Any = chosen.lesson(lessons, "ddp")
    torch.manual_seed(dist.get_rank())
    model, x = _model(sizes), torch.randn(sizes.rows, sizes.width)
    limit = int(sizes.bucket_mib * 2**20)
    # torch takes a limit that it is given for the first bucket, too
    limits = {"bucket_bytes": limit, "first_bucket_bytes": limit}
    contestants = {
        OURS: _contestant(lesson.DistributedDataParallel(copy.deepcopy(model), **limits), x),
        FLAT: _contestant(lesson.FlatDataParallel(copy.deepcopy(model)), x),
        PER_PARAMETER: _contestant(lesson.PerParameterDataParallel(copy.deepcopy(model)), x),
        TORCHS: _contestant(_torchs(copy.deepcopy(model), sizes), x),
    }
    return rivals.measure(contestants, RIVALS, repeats)


def _model(sizes: Sizes) -> nn.Sequential:
    pairs = [
        (nn.Linear(sizes.width, sizes.width), nn.LayerNorm(sizes.width))
        for _ in range(sizes.layers)
    ]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def _torchs(model: nn.Module, sizes: Sizes) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=sizes.bucket_mib, gradient_as_bucket_view=True
    )


def _contestant(model: nn.Module, x: Tensor) -> Contestant:
    finish = getattr(model, "finish_gradient_synchronization", None)  # torch's waits in backward

    def step() -> float:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if finish is not None:
            finish()
        return loss.item()

    return Contestant(model, step)
