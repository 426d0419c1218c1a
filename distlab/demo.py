"""The demo: the same training run on 1 and on 4 workers, side by side."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from distlab import chosen, plot, training
from distlab.training import ConfigError
from distlab.util.text import counted

if TYPE_CHECKING:
    from distlab.lessons import EpochResult

WORKERS = (1, 4)
EPOCHS = 10
NEXT = """\
What to open next
  solutions/phase1_data_parallel/collectives.py   the all-reduce that has just summed the gradients
  solutions/phase1_data_parallel/trainer.py       train_step: why the two curves coincide
  .venv/bin/distlab train --help                  other models, data sets, numbers of workers
  .venv/bin/distlab doctor                        what else this machine can run"""


def run_demo(folder: Path) -> None:
    """Train with 1 and with 4 workers, and print and draw the two histories side by side.

    Args:
        folder: Folder for ``demo.png``; created if it is missing.

    Raises:
        ConfigError: The folder is not writable, or mpirun or torchrun has started this process as
            one of several. The error is raised before training starts.
    """
    training.check_is_alone()
    chosen.check_solutions("train what you have written with distlab train --impl mine")
    _check_writable(folder)
    console = Console()
    start = time.perf_counter()
    histories = {workers: _train(console, workers) for workers in WORKERS}
    console.print(_table(histories))
    for sentence in _findings(histories):
        print(sentence)
    picture = folder / "demo.png"
    plot.training_curves(histories, picture)
    print(f"{picture} shows the curves. {time.perf_counter() - start:.0f} s in all.\n\n{NEXT}")


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written to: {error.strerror}") from None


def _train(console: Console, workers: int) -> list[EpochResult]:
    console.rule(counted(workers, "worker"))
    config = training.make_config(
        dataset="digits",
        model="cnn",
        num_workers=workers,
        epochs=EPOCHS,
        all_reduce="recursive_doubling",
        backend="gloo",
        device="cpu",
    )
    return training.train(replace(config, dtype="float64"))  # keeps rounding errors small


def _table(histories: dict[int, list[EpochResult]]) -> Table:
    table = Table(title="1 worker | 4 workers")
    for heading in ("epoch", "loss", "accuracy", "images/s"):
        table.add_column(heading, justify="right")
    for alone, shared in zip(*(histories[workers] for workers in WORKERS), strict=True):
        table.add_row(
            str(alone.epoch),
            f"{alone.train_loss:.6f} | {shared.train_loss:.6f}",
            f"{alone.test_accuracy:.1%} | {shared.test_accuracy:.1%}",
            f"{alone.images_per_s:,.0f} | {shared.images_per_s:,.0f}",
        )
    return table


def _findings(histories: dict[int, list[EpochResult]]) -> list[str]:
    left, right = (histories[workers] for workers in WORKERS)
    steps = sum(len(result.step_losses) for result in left)
    speed = _images_per_s(right) / _images_per_s(left)
    findings = [
        f"Same training: in float64, over {steps} steps, the two losses were never further apart "
        f"than {largest_difference(left, right):.1e}.",
        f"Same result: test accuracy {left[-1].test_accuracy:.1%} and "
        f"{right[-1].test_accuracy:.1%}.",
        f"Speed: 4 workers trained {speed:.1f} times as many images per second as 1, "
        f"on {os.cpu_count()} cores.",
    ]
    if speed < 0.95:
        findings.append(
            "An 8x8 image is little work: here the messages cost more than sharing it saves."
        )
    return findings


def _images_per_s(history: Sequence[EpochResult]) -> float:
    return statistics.median(result.images_per_s for result in history)


def largest_difference(first: Sequence[EpochResult], second: Sequence[EpochResult]) -> float:
    """Return the largest difference between the two runs' losses at any training step."""
    pairs = (
        zip(left.step_losses, right.step_losses, strict=True)
        for left, right in zip(first, second, strict=True)
    )
    return max(abs(a - b) for steps in pairs for a, b in steps)
