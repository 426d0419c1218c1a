"""What `distlab bench zero --save FOLDER` keeps: all numbers as JSON, and a figure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from distlab.bench.zero import Sharded


def save(
    folder: Path, title: str, measured: Mapping[str, Sharded], arguments: Mapping[str, Any]
) -> None:
    """Write ``zero.json`` and ``zero.png`` into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "title": title,
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "arguments": dict(arguments),
        "measured": {name: asdict(one) for name, one in measured.items()},
    }
    (folder / "zero.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _figure(title, measured).savefig(folder / "zero.png", dpi=150)


def _figure(title: str, measured: Mapping[str, Sharded]) -> Figure:
    """Draw a bar for each way: milliseconds, MB in tensors, and MB of the process."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    figure.suptitle(title)
    panels: dict[str, list[float]] = {
        "step, ms": [1e3 * one.seconds for one in measured.values()],
        "peak memory, MB": [one.peak_bytes / 1e6 for one in measured.values()],
        "process, MB": [one.resident_bytes / 1e6 for one in measured.values()],
    }
    axes = figure.subplots(1, len(panels), sharey=True)
    colors = ["C0" if name.startswith("stage") else "C7" for name in measured]  # ours, torch's
    for ax, (label, values) in zip(axes, panels.items(), strict=True):
        ax.bar_label(ax.barh([*measured], values, color=colors), fmt="%.0f", padding=2)
        ax.set_xlabel(label)
        ax.margins(x=0.15)
    axes[0].invert_yaxis()
    return figure
