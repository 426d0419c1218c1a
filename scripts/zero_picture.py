"""Draw which part of the model's state each rank holds with ZeRO, for ``scripts/figures.py``."""

from collections.abc import Mapping, Sequence

from drawing import EMPTY, FAINT, INK, canvas, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Held = Mapping[str, Sequence[float]]  # by kind and quarter: bytes that a rank holds per parameter

COLOURS = {"parameters": "#7fb0e6", "gradients": "#f6c48a", "optimizer state": "#a8d8a8"}
BYTE, HEIGHT, GAP = 14, 20, 8  # width of a byte per parameter, height of a rank, between kinds
RANKS, NAME, BELOW = 34, 48, 14  # of a panel: left of its parts, above, and below
LEGEND = 34


def picture(stages: Sequence[Sequence[Held]], columns: int = 2) -> Figure:
    """Return a picture with a panel for each stage, from what its ranks hold."""
    width = RANKS + 16 * BYTE + 2 * GAP + BELOW
    height = NAME + len(stages[0]) * HEIGHT + BELOW
    size = columns * width, -(-len(stages) // columns) * height + LEGEND
    figure, axes = canvas(height=size[1], width=size[0])
    for stage, ranks in enumerate(stages):
        row, column = divmod(stage, columns)
        _draw_stage(axes, column * width + RANKS, row * height + NAME, stage, ranks)
    _draw_legend(axes, size[1] - LEGEND)
    return figure


def sum_of(ranks: Sequence[Held]) -> str:
    """Return the bytes per parameter of each kind, and their sum, which are alike on all ranks."""
    (kinds,) = {tuple(sum(quarters) for quarters in held.values()) for held in ranks}
    return f"{' + '.join(f'{kind:g}' for kind in kinds)} = {sum(kinds):g} bytes"


def _draw_stage(axes: Axes, left: float, top: float, stage: int, ranks: Sequence[Held]) -> None:
    """Draw a stage, with the upper left corner of its first quarter at ``left`` and ``top``."""
    axes.text(left, top - 26, f"ZeRO {stage}", size=15, weight="bold", color=INK)
    axes.text(left, top - 7, sum_of(ranks), size=14, color=INK)
    for rank, held in enumerate(ranks):
        y = top + rank * HEIGHT
        write(axes, left - 12, y + HEIGHT / 2, str(rank), colour=FAINT)
        x = left
        for kind in held:
            width = BYTE * max(max(other[kind]) for other in ranks)
            for num_bytes in held[kind]:
                _draw_quarter(axes, x, y, width, COLOURS[kind] if num_bytes else "")
                x += width
            x += GAP


def _draw_quarter(axes: Axes, x: float, y: float, width: float, colour: str) -> None:
    """Draw a quarter, which is empty without a colour."""
    box = Rectangle((x, y + 1), width, HEIGHT - 2, facecolor=colour or "white")
    box.set(edgecolor=FAINT if colour else EMPTY, linewidth=0.8, zorder=2 if colour else 1)
    axes.add_patch(box)


def _draw_legend(axes: Axes, top: float) -> None:
    x = RANKS
    for kind, colour in COLOURS.items():
        axes.add_patch(Rectangle((x, top + 4), 16, 16, facecolor=colour, edgecolor=FAINT))
        write(axes, x + 24, top + 12, kind, ha="left", size=15)
        x += 60 + 9 * len(kind)
