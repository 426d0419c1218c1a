"""Pictures of Phase 4's lessons on checkpoints, for ``scripts/figures.py``."""

from typing import Any

from drawing import WIDTH
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from solutions.phase4_production.fault_tolerance import expected_duration_s, young_interval_s

# --- 4.8: how often to save -----------------------------------------------------------------------

WORK_S, RESTART_S, NODE_MTBF_S, NODES = 86_400, 300, 30 * 86_400, 1000  # the lesson's example
MAX_HOURS = 48  # the upper end of the picture
SAVES_S = {60.0: "#c0661a", 5.0: "#2f6db5"}  # duration of a save -> colour of its curve


def draw_intervals() -> Figure:
    """Draw how long a day of training takes with every interval, and Young's interval."""
    figure = Figure(figsize=(WIDTH / 72, 320 / 72), layout="constrained")
    axes = figure.subplots()
    intervals_s = [60 * 1.05**n for n in range(84)]
    for save_s, colour in SAVES_S.items():
        hours = {s / 60: _hours(s, save_s) for s in intervals_s}
        shown = {minutes: h for minutes, h in hours.items() if h < MAX_HOURS}
        axes.plot([*shown], [*shown.values()], color=colour, linewidth=2.5)
        young_s = young_interval_s(save_s, NODE_MTBF_S, NODES)
        best = young_s / 60, _hours(young_s, save_s)
        axes.plot(*best, "o", color=colour, markersize=9)
        text = f"save of {save_s:.0f} s: Young's\ninterval is {best[0]:.1f} min"
        look: dict[str, Any] = {
            "size": 14,
            "color": colour,
            "ha": "center",
            "textcoords": "offset points",
        }
        axes.annotate(text, best, (0, 26), **look)
    _label(axes)
    return figure


def _hours(interval_s: float, save_s: float) -> float:
    """Return how long the lesson's day of training takes, in hours."""
    return expected_duration_s(WORK_S, interval_s, save_s, RESTART_S, NODE_MTBF_S, NODES) / 3600


def _label(axes: Axes) -> None:
    """Label the axes; the one on the right shows the same as a share of useful time."""
    axes.set_xscale("log")
    ticks = (1, 2, 5, 10, 20, 30, 60)
    axes.set_xticks(ticks, map(str, ticks), size=14)
    axes.set_xticks([], minor=True)
    axes.set(xlim=(1, 60), ylim=(24, MAX_HOURS))
    hours = range(24, MAX_HOURS + 1, 6)
    axes.set_yticks(hours, map(str, hours), size=14)
    axes.set_xlabel("minutes of training between two saves", size=14)
    axes.set_ylabel("hours for a day of training", size=14)
    goodput = axes.twinx()
    percents = (100, 90, 80, 70, 60, 50)
    goodput.set(ylim=axes.get_ylim())
    goodput.set_yticks([2400 / p for p in percents], [f"{p} %" for p in percents], size=14)
    goodput.set_ylabel("goodput", size=14)
    for each in (axes, goodput):
        each.spines[["top"]].set_visible(False)
    axes.grid(color="#e3e8ed")
