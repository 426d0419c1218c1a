"""The picture of a disturbed run: the states of each rank, and the blows that it got."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distlab.chaos.observer import Span

COLOURS = {
    "starting": "#e3c567",
    "training": "#3b6fb6",
    "evaluating": "#6fb07f",
    "stopped": "#b05a9c",
    "down": "#e6e6e6",
}
MARKS = {"kill": "X", "stop": "s", "pause": "P", "agent": "v"}


class Blow(NamedTuple):
    """One disturbance of a rank; ``agent`` hits torchrun itself, and is drawn over all ranks."""

    kind: str
    rank: int
    at_s: float
    step: int


def draw_gantt(spans: Sequence[Sequence[Span]], blows: Sequence[Blow], path: Path) -> None:
    """Draw a row for each rank, over the seconds, with a mark for each blow."""
    figure = Figure(figsize=(13, 1.6 + 0.55 * len(spans)), layout="constrained")
    axes = figure.subplots()
    for rank, row in enumerate(spans):
        bars = [(span.begin_s, span.end_s - span.begin_s) for span in row]
        colours = [COLOURS[span.state] for span in row]
        axes.broken_barh(bars, (rank - 0.35, 0.7), facecolors=colours)
    for blow in blows:
        if blow.kind == "agent":
            axes.axvline(blow.at_s, color="black", linestyle=":", linewidth=1)
        row_of_mark = -0.62 if blow.kind == "agent" else blow.rank
        marker = MARKS[blow.kind]
        axes.plot(blow.at_s, row_of_mark, marker, color="black", markeredgecolor="white", ms=9)
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    axes.set(xlabel="seconds", ylim=(len(spans) - 0.5, -0.9))
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure, {blow.kind for blow in blows})
    figure.savefig(path, dpi=120)


def _legend(figure: Figure, kinds: set[str]) -> None:
    """Explain the colours, and the marks that were drawn."""
    says = {
        "kill": "killed (SIGKILL)",
        "stop": "stopped (SIGSTOP) until others gave up",
        "pause": "stopped for a moment",
        "agent": "torchrun killed",
    }
    states = [Patch(color=colour, label=state) for state, colour in COLOURS.items()]
    axes = figure.axes[0]
    marks = [
        axes.plot([], [], MARKS[kind], color="black", label=text)[0]
        for kind, text in says.items()
        if kind in kinds
    ]
    figure.legend(handles=[*states, *marks], loc="outside upper center", ncols=9, frameon=False)
