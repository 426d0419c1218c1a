"""Plots of measurements (matplotlib; no screen needed)."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

POINT_SIZES = (8, 5, 3)  # keep all points visible where they coincide
PASSES = {"F": ("forward", "#3b6fb6"), "B": ("backward", "#e6842a")}
BUBBLE, ALARM, FORMULA = "#e4e4e4", "#c1121f", "#666666"


class Curve(NamedTuple):
    """Measured values, and the values of a formula."""

    measured: Sequence[float]
    formula: Sequence[float] = ()


def curves(axes: Axes, xs: Sequence[int], named: Mapping[str, Curve], **texts: str) -> None:
    """Draw points for measurements at some sizes, and grey lines for formulas.

    Args:
        axes: Axes of a picture.
        xs: Sizes, each with a tick, on a log scale unless ``texts`` specifies another.
        named: Legend text -> curve; if a curve has no formula, lines join its points.
        texts: Values of title, xlabel and ylabel, and optionally of xscale and yscale.
    """
    for (name, curve), size in zip(named.items(), cycle(POINT_SIZES), strict=False):
        line = "" if curve.formula else "-"
        axes.plot(xs, curve.measured, f"o{line}", markersize=size, linewidth=1, label=name)
    formulas = [curve.formula for curve in named.values() if curve.formula]
    for number, formula in enumerate(formulas):
        axes.plot(xs, formula, color=FORMULA, linewidth=1, label="" if number else "formula")
    axes.set(**{"xscale": "log"} | texts)
    if "yscale" not in texts:
        axes.set_ylim(0, 1.1 * max(map(max, [*formulas, *(c.measured for c in named.values())])))
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    if formulas or len(named) > 1:
        axes.legend(fontsize=9)


Pass = tuple[str, float, float]  # an action such as "F0" or "B3.1"; start and end in seconds


def passes(axes: Axes, stages: Sequence[Sequence[Pass]], title: str) -> None:
    """Draw a lane for each stage of a pipeline, with each pass labelled by its micro-batch.

    Chunks after the first are lighter; the bubble is grey.
    """
    end_s = max(end for stage in stages for _, _, end in stage)
    axes.barh(range(len(stages)), 1e3 * end_s, height=0.8, color=BUBBLE)
    for lane, stage in enumerate(stages):
        for name, start, end in stage:
            micro_batch, _, chunk = name[1:].partition(".")
            colour = _lighter(PASSES[name[0]][1], int(chunk or 0))
            left, width = 1e3 * start, 1e3 * (end - start)
            axes.barh(lane, width, 0.8, left, color=colour, edgecolor="white", linewidth=0.5)
            axes.text(left + width / 2, lane, micro_batch, ha="center", va="center", fontsize=7)
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _lighter(colour: str, chunk: int) -> str:
    """Mix a colour with white, with more white for each further chunk."""
    share = 0.75 * 0.6**chunk  # keeps labels readable, even on the darkest chunk, the first
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def legend_of_passes(figure: Figure, num_chunks: int) -> None:
    """Add a legend for the colours of ``passes`` above a picture."""
    kinds = {
        f"{name}, chunk {chunk}": _lighter(colour, chunk)
        for name, colour in PASSES.values()
        for chunk in range(num_chunks)
    }
    patches = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    patches.append(Patch(color=BUBBLE, label="bubble"))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False)


def loss_scale(axes: Axes, scales: Sequence[float], is_skipped: Sequence[bool]) -> None:
    """Draw a loss scale over the steps, and mark skipped steps."""
    axes.step(range(len(scales)), scales, where="post", label="scale")
    skipped = [step for step, is_marked in enumerate(is_skipped) if is_marked]
    marks = [scales[step] for step in skipped]
    axes.plot(skipped, marks, "x", color=ALARM, label="skipped step")
    axes.set_yscale("log", base=2)
    axes.set(title="Loss scale", xlabel="step", ylabel="scale")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def stacks(
    axes: Axes,
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    formula: Sequence[float] = (),
    **texts: str,
) -> None:
    """Draw a stacked bar for each name.

    Args:
        axes: Axes of a picture.
        names: Texts below the bars.
        parts: Legend text -> height of this part in each bar.
        formula: Expected height of each bar, marked on the bar.
        texts: Values of title and ylabel.
    """
    bottom = np.zeros(len(names))
    for part, heights in parts.items():
        axes.bar(names, heights, 0.7, bottom, label=part)
        bottom += heights
    if formula:
        axes.plot(names, formula, "D", color=FORMULA, markersize=5, label="formula")
    axes.set(ylim=(0, 1.2 * bottom.max()), **texts)  # leaves room for the legend
    axes.legend(fontsize=9, ncols=len(parts) + 1, loc="upper left")
