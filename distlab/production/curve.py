"""The picture of a run: its loss, accuracy and speed over the epochs."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def draw_curve(run_dir: Path) -> None:
    """Draw ``run_dir``/curve.png from metrics.rank0.jsonl, the record of rank 0."""
    lines = (run_dir / "metrics.rank0.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, speed = figure.subplots(1, 3)
    _draw(loss, records, "loss", "training loss", "cross entropy")
    _draw(accuracy, records, "accuracy", "test accuracy", "%", factor=100.0, marker="o")
    _draw(speed, records, "images_per_s", "speed of all ranks", "images/s")
    speed.set_ylim(bottom=0)
    figure.savefig(run_dir / "curve.png", dpi=110)


def _draw(
    axes: Axes,
    records: list[dict[str, Any]],
    name: str,
    title: str,
    unit: str,
    *,
    factor: float = 1.0,
    marker: str = "",
) -> None:
    points = [(r["epoch"], factor * float(r[name])) for r in records if name in r]
    axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, color="#3b6fb6")
    axes.set(title=title, xlabel="epoch", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
