"""The demo: the same training run on 1 and on 4 workers, side by side."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from distlab import chosen
from distlab.launch.launchers import check_is_alone
from distlab.lessons import COURSE
from distlab.production.errors import ConfigError
from distlab.util.text import counted

WORKERS = (1, 4)
OPTIONS = (f"--config={COURSE / 'configs/digits_cnn.yaml'}", "--precision=fp64", "--backend=gloo")
NEXT = """\
What to open next
  solutions/phase1_data_parallel/collectives.py   the all-reduce that has just summed the gradients
  solutions/phase4_production/imagenet_trainer.py the trainer, on one page
  configs/digits_cnn.yaml                         what it has just trained
  .venv/bin/distlab train --help                  other models, data sets, numbers of workers
  .venv/bin/distlab doctor                        what else this machine can run"""
Records = list[dict[str, float]]  # a run's metrics, as it has written them


def run_demo(folder: Path, *options: str) -> None:
    """Train with 1 and with 4 workers, and print and draw the two runs side by side.

    Args:
        folder: Folder for ``demo.png`` and a new folder with both runs; created if it is missing.
        options: Further options of ``distlab train``.

    Raises:
        ConfigError: The folder is not writable, or a training run failed.
        SetupError: mpirun or torchrun has started this process as one of several.
    """
    check_is_alone()
    chosen.check_solutions("train what you have written with distlab train --impl mine")
    _check_writable(folder)
    console, start = Console(), time.perf_counter()
    runs = Path(tempfile.mkdtemp(prefix="demo-", dir=folder))
    trained = {workers: _train(console, workers, runs, options) for workers in WORKERS}
    console.print(_table(trained))
    for sentence in _findings(trained):
        print(sentence)
    picture = folder / "demo.png"
    _draw(trained, picture)
    print(f"{picture} shows the curves, {runs} has both runs.", end=" ")
    print(f"{time.perf_counter() - start:.0f} s in all.\n\n{NEXT}")


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written to: {error.strerror}") from None


def _train(console: Console, workers: int, runs: Path, options: tuple[str, ...]) -> Records:
    console.rule(counted(workers, "worker"))
    run_dir = runs / str(workers)
    own = f"--num_gpus={workers}", f"--run_dir={run_dir}"
    command = [sys.executable, "-m", "distlab", "train", *OPTIONS, *own, *options]
    if subprocess.run(command, check=False).returncode:
        raise ConfigError(f"{' '.join(command[2:])} has failed: its last lines say why")
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _of(records: Records, name: str) -> list[float]:
    return [record[name] for record in records if name in record]


def _table(trained: dict[int, Records]) -> Table:
    table = Table(title="1 worker | 4 workers")
    for heading in ("epoch", "test loss", "accuracy"):
        table.add_column(heading, justify="right")
    names = "test_loss", "accuracy"
    columns = [_of(trained[workers], name) for name in names for workers in WORKERS]
    for epoch, (alone, shared, right, also) in enumerate(zip(*columns, strict=True), start=1):
        table.add_row(str(epoch), f"{alone:.6f} | {shared:.6f}", f"{right:.1%} | {also:.1%}")
    return table


def _findings(trained: dict[int, Records]) -> list[str]:
    alone, shared = (trained[workers] for workers in WORKERS)
    speed = _images_per_s(shared) / _images_per_s(alone)
    losses = zip(_of(alone, "loss"), _of(shared, "loss"), strict=True)
    return [
        f"Same training: in float64, over {alone[-1]['step']} steps, the two losses, means of ten "
        f"steps, were never further apart than {max(abs(a - b) for a, b in losses):.1e}.",
        "Same result: test accuracy "
        f"{_of(alone, 'accuracy')[-1]:.1%} and {_of(shared, 'accuracy')[-1]:.1%}.",
        f"Speed: 4 workers trained {speed:.1f} times as many images per second as 1, "
        f"on {os.cpu_count()} cores.",
        *_remarks(speed, os.cpu_count() or 1),
    ]


def _remarks(speed: float, cores: int) -> list[str]:
    """Return a line about a speed-up that is below 1, or higher than the cores allow."""
    limit = min(cores, max(WORKERS))
    if speed > limit:
        return [
            f"Do not trust that speed: here, 4 workers can be {limit} times as fast at most. Other "
            "programs slowed the run with 1 worker; repeat it on an idle machine."
        ]
    if speed < 0.95:
        return ["An 8x8 image is little work: here the messages cost more than sharing it saves."]
    return []


def _images_per_s(records: Records) -> float:
    return statistics.median(_of(records, "images_per_s"))


def _draw(trained: dict[int, Records], path: Path) -> None:
    """Draw the losses, accuracies and speeds of all runs."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, accuracy, speed = figure.subplots(1, 3)
    for (workers, records), style, width in zip(
        trained.items(), ("-", "--"), (3, 1.5), strict=True
    ):
        label = counted(workers, "worker")
        for axes, name, factor in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
            epochs = [record["epoch"] for record in records if name in record]
            values = [factor * value for value in _of(records, name)]
            axes.plot(epochs, values, style, linewidth=width, label=label)
        speed.bar(label, _images_per_s(records), width=0.5)
    loss.set(title="training loss", xlabel="epoch", ylabel="cross entropy", yscale="log")
    loss.legend()
    accuracy.set(title="test accuracy", xlabel="epoch", ylabel="%")
    speed.set(title="speed", ylabel="images/s")
    for axes in (loss, accuracy, speed):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
