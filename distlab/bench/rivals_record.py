"""What `--save FOLDER` keeps of ours beside torch's own: all numbers as JSON, and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.bench import saving
from distlab.bench.rivals import Column, M

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, RIVAL = "C0", "C7"  # colors


def save(
    folder: Path,
    name: str,
    title: str,
    measured: Mapping[str, M],
    rivals: Mapping[str, str],
    columns: tuple[Column[M], ...],
    arguments: Mapping[str, object],
) -> None:
    """Write ``name.json`` and ``name.png`` into a folder, and print their paths.

    Args:
        folder: made if it is missing.
        name: of the files, which are replaced.
        title: of the figure.
        measured: what the file holds in full, by contestant.
        rivals: whose bars are gray.
        columns: of the table; each is a panel of the figure.
        arguments: on which the numbers depend, the machine apart.
    """
    rows = {contestant: asdict(found) for contestant, found in measured.items()}
    results = {"title": title, "arguments": dict(arguments), "measured": rows}
    saving.save(folder, name, results, _figure(title, measured, rivals, columns))


def _figure(
    title: str,
    measured: Mapping[str, M],
    rivals: Mapping[str, str],
    columns: tuple[Column[M], ...],
) -> Figure:
    """Draw a panel for each column, with a bar for each contestant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 2.5 * len(columns), 3.2), layout="constrained")
    figure.suptitle(title)
    colors = [RIVAL if name in rivals else OURS for name in measured]
    axes = figure.subplots(1, len(columns), sharey=True)
    for ax, (heading, number_of, text) in zip(axes, columns, strict=True):
        numbers = [number_of(found) for found in measured.values()]
        bars = ax.barh([*measured], numbers, color=colors)
        ax.bar_label(bars, [text(number) for number in numbers], padding=2)
        ax.set_title(heading, fontsize="medium")
        ax.set_xticks([])  # the bars are labelled, in units that are easy to read
        ax.margins(x=0.4)
    axes[0].invert_yaxis()
    return figure
