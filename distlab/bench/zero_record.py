"""What `distlab bench zero --save FOLDER` keeps: all numbers as JSON, and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from distlab.bench import saving

if TYPE_CHECKING:
    from distlab.bench.zero import Sharded


def save(
    folder: Path, title: str, measured: Mapping[str, Sharded], arguments: Mapping[str, Any]
) -> None:
    """Write ``zero.json`` and ``zero.png`` into a folder, which is made if need be."""
    rows = {name: asdict(one) for name, one in measured.items()}
    results = {"title": title, "arguments": dict(arguments), "measured": rows}
    saving.save(folder, "zero", results, _figure(title, measured))


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
