"""The three stages of ZeRO of Phase 3 beside torch's ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from distlab import chosen, launch
from distlab.bench import rivals, rivals_record
from distlab.bench.collectives import Collectives
from distlab.bench.rivals import Column, Counts, Measured
from distlab.bench.zero_contestants import CONTESTANTS, RIVALS, SIZES, Sizes, Trained, model_of
from distlab.grade.submission import Submission
from distlab.sim.device.device import Device
from distlab.util.text import bytes_text, counted

TASKS = ("3.18", "3.19", "3.20")
LARGEST_DIFFERENCE = 1e-3  # of two updates, as a part of one: float32, summed in another order
WARM_UP = 3  # steps: in the first, Adam makes its state
STATUS = Path("/proc/self/status")  # of Linux
NOTES = """\
A step: zero_grad, forward, backward and fused AdamW, all in float32. FSDP2 has no stage 2; nearest
is reshard_after_forward=False, which keeps the parameters whole from the forward to the backward
pass, but not between the steps, as stage 2 does. Collectives and bytes are those of a second step;
bytes are those of all tensors that they are called with, results in memory of their own included.
Peak memory: most bytes in tensors at once during two steps, parameters and optimizer included, on
the rank with most. Of what a collective needs inside, only the process knows.
Process: how far the resident memory of a fresh process rises, from before there is a model."""


@dataclass(frozen=True)
class Sharded(Measured):
    """A step, and the memory of a process.

    Attributes:
        resident_bytes: by which a process grows at most; 0 where the system does not tell.
    """

    resident_bytes: int


PROCESS: Column[Sharded] = ("process", lambda measured: measured.resident_bytes, bytes_text)
COLUMNS: tuple[tuple[Column[Sharded], ...], ...] = (  # of two tables: one would be too wide
    (rivals.STEP, rivals.PEAK, PROCESS),
    (rivals.COLLECTIVES, rivals.BYTES),
)


def print_table(ranks: int, repeats: int, impl: str, folder: Path | None = None) -> None:
    """Train a model in all six ways; print, and if wanted save, what a step needs.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed, or ours trains something else than torch's.
    """
    lessons = chosen.find(impl, TASKS)
    steps, *_ = launch.run(measure_on_rank, ranks, lessons, SIZES, repeats, backend="gloo")
    measured = {name: _with_process(one, name, ranks, lessons) for name, one in steps.items()}
    where = f"{counted(SIZES.layers, 'layer')} on {counted(ranks, 'gloo rank')}"
    title = f"{where}: median of {repeats} steps"
    for columns in COLUMNS:
        Console().print(rivals.table(title, measured, RIVALS, columns))
    print(rivals.WHOSE[impl], NOTES, rivals.PARENTHESES, sep="\n")
    if folder is not None:
        arguments = {"ranks": ranks, "repeats": repeats, "impl": impl, **SIZES._asdict()}
        rivals_record.save(folder, "zero", title, measured, RIVALS, COLUMNS[0], arguments)


def _with_process(steps: Measured, name: str, ranks: int, lessons: Submission) -> Sharded:
    rises = launch.run(resident_on_rank, ranks, lessons, SIZES, name, backend="gloo")
    return Sharded(**asdict(steps), resident_bytes=max(rises))


def measure_on_rank(lessons: Submission, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Measure steps of all contestants, with one model, and a batch of this rank.

    Raises:
        ValueError: after two steps, ours has other parameters than its rival.
    """
    lesson, x = _lesson_and_batch(lessons, sizes)
    contestants, counts, values = {}, [], {}
    for name in CONTESTANTS:
        trained, count = _count(name, lesson, sizes, x)
        contestants[name], values[name] = trained.contestant, trained.whole()
        counts.append(count)
    for rival, ours in RIVALS.items():
        _check_values(values[ours], values[rival], sizes, f"{ours} and {rival}")
    return rivals.timed(contestants, counts, repeats)


def resident_on_rank(lessons: Submission, sizes: Sizes, name: str) -> int:
    """Return by how many bytes this process rises at most while one contestant trains."""
    lesson, x = _lesson_and_batch(lessons, sizes)
    small = sizes._replace(width=8, layers=1)  # imports what is imported on first use
    CONTESTANTS[name](lesson, small, x[:, :8]).contestant.run()
    before = _resident("VmRSS")
    trained = CONTESTANTS[name](lesson, sizes, x)
    for _ in range(WARM_UP):
        trained.contestant.run()
    return _resident("VmHWM") - before


def _lesson_and_batch(lessons: Submission, sizes: Sizes) -> tuple[Any, Tensor]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(sizes.rows, sizes.width)
    return chosen.lesson(lessons, "zero"), x


def _resident(key: str) -> int:
    if not STATUS.exists():
        return 0
    rows = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return 1024 * int(rows[key].split()[0])


def _count(name: str, lesson: Any, sizes: Sizes, x: Tensor) -> tuple[Trained, Counts]:
    """Return the peak over two steps, and the collectives of the second."""
    with Device(None, advance=lambda *_: None) as device:
        trained = CONTESTANTS[name](lesson, sizes, x)
        device.memory.restart_peak()
        trained.contestant.run()
        with Collectives() as collectives:
            trained.contestant.run()
    return trained, (device.memory.peak_bytes, collectives.calls, collectives.num_bytes)


def _check_values(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], sizes: Sizes, who: str
) -> None:
    for name, first in model_of(sizes).named_parameters():
        update = (theirs[name] - first).norm().item()
        difference = (theirs[name] - ours[name]).norm().item()
        if not difference <= LARGEST_DIFFERENCE * update:
            raise ValueError(
                f"{who} do not train the same: on rank {dist.get_rank()}, after two steps, {name} "
                f"differs by {difference:.3g}, and it was updated by {update:.3g}"
            )
