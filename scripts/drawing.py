"""What the drawn pictures of the guidelines share: a canvas, boxes, texts, arrows and colours.

All lengths are points, and y grows downwards. A screen of 400 pixels shows a point of a picture
that is ``WIDTH`` wide as 0.7 of a pixel, so that texts need a size of at least 13.
"""

from collections.abc import Sequence
from itertools import product
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

WIDTH = 570
INK, FAINT, EMPTY = "#22303c", "#5d6975", "#d5dbe1"
BLUE, ORANGE, GREEN, PURPLE = "#a9c9ee", "#f6c48a", "#a8d8a8", "#dfb3dc"
RED, GREY, WHITE = "#c0392b", "#e9edf1", "#ffffff"


def canvas(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return an empty picture and its only axes, whose units are points."""
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    colour: str = INK,
    ha: Literal["left", "center", "right"] = "center",
    size: float = 14,
    bold: bool = False,
) -> None:
    """Write a line of text whose middle is at the height ``y``."""
    weight: Literal["bold", "normal"] = "bold" if bold else "normal"
    axes.text(x, y, text, ha=ha, va="center_baseline", size=size, color=colour, weight=weight)


def box(
    axes: Axes,
    left: float,
    top: float,
    width: float,
    height: float,
    text: str = "",
    *,
    fill: str = WHITE,
    edge: str = FAINT,
    dashed: bool = False,
    size: float = 14,
) -> None:
    """Draw a box with a text in its middle."""
    patch = Rectangle((left, top), width, height, facecolor=fill, edgecolor=edge)
    patch.set(linestyle="--" if dashed else "-", zorder=1)
    axes.add_patch(patch)
    if text:
        write(axes, left + width / 2, top + height / 2, text, size=size)


def line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], colour: str = FAINT, width: float = 1.5
) -> None:
    """Draw a line through points, behind the boxes."""
    axes.plot(xs, ys, color=colour, linewidth=width, zorder=0)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = FAINT
) -> None:
    """Draw an arrow from one point to another."""
    look = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "mutation_scale": 15}
    look |= {"shrinkA": 0, "shrinkB": 0}  # ends where it is told
    axes.annotate("", end, start, arrowprops=look)


def matrix(
    axes: Axes,
    left: float,
    middle: float,
    shape: Sequence[int],
    cell: int,
    fill: str,
    text: str = "",
) -> None:
    """Draw a matrix with a square for each number, and its name in it."""
    rows, columns = shape
    top = middle - rows * cell / 2
    for row, column in product(range(rows), range(columns)):
        place = left + column * cell, top + row * cell
        box(axes, *place, cell, cell, fill=fill, edge=WHITE)
    box(axes, left, top, columns * cell, rows * cell, fill="none")
    write(axes, left + columns * cell / 2, middle, text, size=14)
