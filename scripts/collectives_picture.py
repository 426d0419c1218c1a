"""Draw what each rank holds before and after a collective, for ``scripts/figures.py``."""

from collections.abc import Mapping, Sequence

from drawing import BLUE, EMPTY, FAINT, GREEN, INK, ORANGE, PURPLE, canvas, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Side = Sequence[str]  # a label for each part that a rank holds, "" where it holds none
Panel = Sequence[tuple[Side, Side]]  # by rank: before and after

COLOURS = {"a": BLUE, "b": ORANGE, "c": GREEN, "d": PURPLE}  # by rank of origin
WIDTH, HEIGHT = 27, 24  # of a part
STRIPE = 8  # height of the colours under a sum
ARROW = 30  # between before and after
RANKS, NAME, BELOW = 34, 25, 15  # of a panel: left of its parts, above, and below


def picture(panels: Mapping[str, Panel], columns: int = 2) -> Figure:
    """Return a picture with a panel for each collective."""
    num_ranks = len(next(iter(panels.values())))
    width = RANKS + 2 * num_ranks * WIDTH + ARROW
    height = NAME + num_ranks * HEIGHT + BELOW
    size = columns * width + BELOW, -(-len(panels) // columns) * height
    figure, axes = canvas(height=size[1], width=size[0])
    for number, (name, panel) in enumerate(panels.items()):
        row, column = divmod(number, columns)
        _draw_panel(axes, column * width + RANKS, row * height + NAME, name, panel)
    return figure


def _draw_panel(axes: Axes, left: float, top: float, name: str, panel: Panel) -> None:
    """Draw a collective, with the upper left corner of its first part at ``left`` and ``top``."""
    axes.text(left, top - 6, name, size=15, weight="bold", color=INK)
    width = len(panel[0][0]) * WIDTH
    for rank, (before, after) in enumerate(panel):
        y = top + rank * HEIGHT
        write(axes, left - 10, y + HEIGHT / 2, str(rank), colour=FAINT)
        _draw_side(axes, left, y, before)
        _draw_side(axes, left + width + ARROW, y, after)
    start, y = left + width + 4, top + len(panel) * HEIGHT / 2
    look = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 2, "mutation_scale": 16}
    axes.annotate("", (start + ARROW - 8, y), (start, y), arrowprops=look)


def _draw_side(axes: Axes, left: float, top: float, side: Side) -> None:
    """Draw what a rank holds before or after: a box for each part."""
    for slot, label in enumerate(side):
        x, middle = left + slot * WIDTH, top + HEIGHT / 2
        colour, edge = COLOURS.get(label[:1], "white"), FAINT if label else EMPTY
        box = Rectangle((x, top), WIDTH, HEIGHT, facecolor=colour, edgecolor=edge)
        box.set_zorder(2 if label else 1)
        axes.add_patch(box)
        if label.startswith("Σ"):
            _draw_stripes(axes, x, top + HEIGHT - STRIPE)
            middle -= STRIPE / 2
        if label:
            write(axes, x + WIDTH / 2, middle, label)


def _draw_stripes(axes: Axes, left: float, top: float) -> None:
    """Draw the colours of all ranks side by side."""
    width = WIDTH / len(COLOURS)
    for number, colour in enumerate(COLOURS.values()):
        stripe = Rectangle((left + number * width, top), width, STRIPE, facecolor=colour)
        stripe.set(edgecolor=FAINT, linewidth=0.5, zorder=2)
        axes.add_patch(stripe)
