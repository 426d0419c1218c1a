"""Run the trainer on a handful of images, and pause after the step that a test names.

    PACE/hold          the step after which ranks wait until the file is gone or names another step
    PACE/rank<r>       the pid of a rank that waits there, and the step

A waiting rank keeps reporting that it is alive, as it does between steps.
"""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from little_runs import little_data

from distlab.production import reports, telemetry
from distlab.production.program import run_program
from solutions.phase4_production import imagenet_trainer
from solutions.phase4_production.imagenet_trainer import Training, train

PACE = "PACE"  # environment variable that names the folder


def after_step(training: Training) -> None:
    """Do the trainer's work after a step, then wait as long as the test holds that step."""
    _after_step(training)
    step, folder = training.progress.step, Path(os.environ[PACE])
    while _held(folder) == step:
        told = folder / f"rank{dist.get_rank()}"
        told.with_suffix(".new").write_text(f"{os.getpid()} {step}")
        told.with_suffix(".new").replace(told)
        training.telemetry.alive()
        time.sleep(0.05)


def _held(folder: Path) -> int:
    try:
        return int((folder / "hold").read_text())
    except (FileNotFoundError, ValueError):
        return -1


_after_step = Training.after_step

if __name__ == "__main__":
    with (
        mock.patch.object(Training, "after_step", after_step),
        mock.patch.object(reports, "PORT_S", 0.5),
        mock.patch.object(telemetry, "AGREE_EVERY_S", 0.0),  # steps take milliseconds
        mock.patch.object(imagenet_trainer, "open_images", little_data),
    ):
        sys.exit(run_program(train, ""))
