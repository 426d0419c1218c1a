"""Run the trainer on a handful of images, and pause after the step that a test names.

    PACE/hold          the step after which ranks wait until the file is gone or names another step
    PACE/rank<r>       the pid of a rank that waits there, and the step
    PACE/fate          what rank 1 does after step 2: raise an exception, or loop endlessly
    PACE/inside        the step in which rank 1 waits between its forward and backward pass
    PACE/disk          the seconds that writing a checkpoint takes
    PACE/loading       0: ranks wait while they load a checkpoint, and name step 0

If there is a fate, nobody can destroy the process group, as on NCCL while a rank waits for another.
A waiting rank keeps reporting that it is alive, as it does between steps; inside a step, it does
not.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from little_runs import little_data
from torch import Tensor

from distlab.production import reports, telemetry
from distlab.production.checkpoint_files import InShards, Whole
from distlab.production.program import run_program
from solutions.phase4_production import imagenet_trainer
from solutions.phase4_production.imagenet_trainer import Training, train

PACE = "PACE"  # environment variable that names the folder


def after_step(training: Training) -> None:
    """Do the trainer's work after a step, then wait as long as the test holds that step."""
    _after_step(training)
    step = training.progress.step
    if step == 2 and dist.get_rank() == 1:
        meet(_fate(Path(os.environ[PACE])))
    while _waits(step, "hold"):
        training.telemetry.alive()


def meet(fate: str) -> None:
    """Do what a test has told rank 1 to do."""
    if fate == "raise":
        raise ValueError("a bug on one rank")
    while fate == "loop":
        pass


def _fate(folder: Path) -> str:
    file = folder / "fate"
    return file.read_text() if file.exists() else ""


def loss_sum(training: Training, logits: Tensor, targets: Tensor) -> Tensor:
    """Wait on rank 1 as long as the test holds the step, then return the loss."""
    while dist.get_rank() == 1 and _waits(training.progress.step + 1, "inside"):
        pass
    return _loss_sum(training, logits, targets)


def write(files: Whole, snapshot: Any, step: int) -> None:
    """Write a checkpoint as slowly as the test has said."""
    file = Path(os.environ[PACE]) / "disk"
    time.sleep(float(file.read_text()) if file.exists() else 0.0)
    _write(files, snapshot, step)


def read(files: Whole) -> Any:
    """Load a whole checkpoint on rank 0, after a wait if the test says so."""
    while _waits(0, "loading"):
        pass
    return _read(files)


def load(files: InShards, wanted: Any) -> Any:
    """Load shards on this rank, after a wait if the test says so."""
    while _waits(0, "loading"):
        pass
    return _load(files, wanted)


def _waits(step: int, held: str) -> bool:
    """Tell the test of this rank and wait for a moment if a file holds this step."""
    folder = Path(os.environ[PACE])
    if _held(folder / held) != step:
        return False
    told = folder / f"rank{dist.get_rank()}"
    told.with_suffix(".new").write_text(f"{os.getpid()} {step}")
    told.with_suffix(".new").replace(told)
    time.sleep(0.05)
    return True


def _held(file: Path) -> int:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return -1


_after_step, _loss_sum, _write = Training.after_step, Training.loss_sum, Whole.write
_read, _load = Whole._read, InShards._load

if __name__ == "__main__":
    if _fate(Path(os.environ[PACE])):
        dist.destroy_process_group = threading.Event().wait
    with (
        mock.patch.object(Training, "after_step", after_step),
        mock.patch.object(Training, "loss_sum", loss_sum),
        mock.patch.object(Whole, "write", write),
        mock.patch.object(Whole, "_read", read),
        mock.patch.object(InShards, "_load", load),
        mock.patch.object(reports, "PORT_S", 0.5),
        mock.patch.object(telemetry, "AGREE_EVERY_S", 0.0),  # steps take milliseconds
        mock.patch.object(imagenet_trainer, "open_data", little_data),
    ):
        sys.exit(run_program(train, ""))
