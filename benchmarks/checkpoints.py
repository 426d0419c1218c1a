"""How long training waits for a checkpoint: the copy of an asynchronous save beside a whole save.

python benchmarks/checkpoints.py --mib 256 --repeats 5
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from distlab.util.text import seconds_text
from solutions.phase4_production.checkpoint import AsyncCheckpointer, save_checkpoint


class Seconds(NamedTuple):
    """Of one save each way."""

    whole_s: float  # save_checkpoint: training waits for all of it
    snapshot_s: float  # AsyncCheckpointer.save: training waits for this alone
    write_s: float  # meanwhile, in its thread


def measure(state: dict[str, torch.Tensor], folder: Path, step: int) -> Seconds:
    """Save a state both ways, each in a folder of its own that keeps one checkpoint."""
    begun_s = time.perf_counter()
    save_checkpoint(state, folder / "whole", step, keep=1)
    whole_s = time.perf_counter() - begun_s
    with AsyncCheckpointer(lambda s, n: save_checkpoint(s, folder / "async", n, keep=1)) as saver:
        saver.save(state, step)
    return Seconds(whole_s, saver.snapshot_s, saver.write_s)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of the state")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    state = {str(i): torch.randn(2**18) for i in range(chosen.mib)}  # 1 MiB each
    with tempfile.TemporaryDirectory(dir=".") as folder:
        runs = [measure(state, Path(folder), step) for step in range(chosen.repeats)]
    for name, column in zip(Seconds._fields, zip(*runs, strict=True), strict=True):
        print(f"{name:<12}{seconds_text(median(column))}")
    share = median(run.snapshot_s / run.whole_s for run in runs)
    print(f"training waits for {share:.1%} of a whole save")


if __name__ == "__main__":
    main()
