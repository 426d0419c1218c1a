"""Pictures of where GPUs, links and parts of matrices are, for ``scripts/figures.py``."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from drawing import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    arrow,
    box,
    canvas,
    line,
    matrix,
    write,
)
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from distlab.sim import Cluster, simulate
from phase2_advanced.given import MLP
from solutions.phase2_advanced.tensor_parallel import parallelize_mlp

# --- 3.6: two nodes -------------------------------------------------------------------------------

LEFT, COLUMN, CHIP = 90, 59, 53  # left of the first column; widths of a column and of a box in it
SWITCH, GPU, NIC = (8, 28), (52, 28), (94, 26)  # in a node: distance from its outer end, and height
NODE, RAILS = 126, 90  # heights of a node, and of what is between two


def draw_nodes() -> Figure:
    """Draw two nodes of the preset dgx-h100, mirrored, and the switches that join their NICs."""
    cluster = Cluster.preset("dgx-h100")
    figure, axes = canvas(height=2 * NODE + RAILS + 8)
    for node in range(2):
        _draw_node(axes, cluster, node)
    middle = 4 + NODE + RAILS / 2
    write(axes, 4, middle - 10, "switches", ha="left", bold=True)
    write(axes, 4, middle + 10, _speed(cluster.nic_bytes_per_s), ha="left", size=13)
    for rail in range(cluster.nics_per_node):
        x, (light, strong) = LEFT + rail * COLUMN, _colours(rail)
        for end in (4 + NODE - 6, 4 + NODE + RAILS + 6):
            line(axes, [x + CHIP / 2] * 2, [middle, end], colour=strong, width=5)
        box(axes, x, middle - 14, CHIP, 28, f"rail {rail}", fill=light, size=13)
    return figure


def _draw_node(axes: Axes, cluster: Cluster, node: int) -> None:
    """Draw the upper node or, upside down, the lower one."""
    num_gpus = cluster.gpus_per_node
    outer, sign = (4, 1) if node == 0 else (4 + 2 * NODE + RAILS, -1)

    def top_of(part: tuple[int, int]) -> float:
        """Return the upper end of a part."""
        return outer + part[0] if sign == 1 else outer - sum(part)

    inner = outer + sign * NODE
    middle = (outer + inner) / 2
    write(axes, 4, middle - 10, f"node {node}", ha="left", bold=True)
    ranks = f"ranks {node * num_gpus}–{(node + 1) * num_gpus - 1}"
    write(axes, 4, middle + 10, ranks, ha="left", size=13)
    box(axes, LEFT - 6, min(outer, inner), COLUMN * num_gpus + 4, NODE, fill=GREY)
    for column in range(num_gpus):
        x = LEFT + column * COLUMN
        ends = [top_of(SWITCH) + 14, top_of(NIC) + 14]
        axes.plot([x + CHIP / 2] * 2, ends, color=FAINT, linewidth=3, zorder=1)
        box(axes, x, top_of(GPU), CHIP, GPU[1], f"GPU {column}", fill=GREEN, size=13)
        box(axes, x, top_of(NIC), CHIP, NIC[1], f"NIC {column}", fill=_colours(column)[0], size=13)
    width = COLUMN * num_gpus - (COLUMN - CHIP)
    text = f"NVSwitch, {_speed(cluster.nvlink_bytes_per_s)} from and to each GPU"
    box(axes, LEFT, top_of(SWITCH), width, SWITCH[1], text, fill=BLUE)


def _speed(bytes_per_s: float) -> str:
    """Return a speed as text."""
    return f"{bytes_per_s / 1e9:.0f} GB/s"


def _colours(rail: int) -> tuple[str, str]:
    """Return a light and a strong colour of a rail."""
    return to_hex(colormaps["tab20"](2 * rail + 1)), to_hex(colormaps["tab20"](2 * rail))


# --- 2.12 to 2.15: a split MLP --------------------------------------------------------------------


class Parts(NamedTuple):
    """The shapes of what a rank holds of an MLP, in the paper's notation: rows by columns."""

    x: torch.Size
    a: torch.Size  # of ``up``: the transpose of torch's weight
    h: torch.Size
    b: torch.Size  # of ``down``
    y: torch.Size


def split_mlp() -> list[Parts]:
    """Split an MLP of width 2 over two simulated ranks, and return what each of them holds."""
    return simulate(_split_mlp, 2).results


def _split_mlp() -> Parts:
    """Apply this rank's part of an MLP to three positions."""
    mlp, x = MLP(2), torch.zeros(3, 2)
    parallelize_mlp(mlp)
    hidden: list[Tensor] = []
    mlp.down.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    y = mlp(x)
    return Parts(x.shape, mlp.up.weight.T.shape, hidden[0].shape, mlp.down.weight.T.shape, y.shape)


SPLIT = (BLUE, ORANGE)  # what only rank 0 or only rank 1 has
CELL, WHOLE_CELL, BAR = 17, 9, 24  # side of a number, the same in the upper part, width of a bar
MLP_LANE, WHOLE, PASS = 76, 106, 176  # heights: of a rank, of the upper part, and of a pass
# Left ends of x, the left bar, x or its gradient on each rank, A, H, B, y on each rank, the right
# bar, and y
COLUMNS = (64, 110, 152, 206, 294, 382, 436, 488, 530)


def draw_split_mlp() -> Figure:
    """Draw the matrices and their halves, and both passes on two ranks."""
    ranks = split_mlp()
    figure, axes = canvas(height=WHOLE + 2 * PASS)
    _draw_whole(axes, ranks)
    for number, name in enumerate(("forward", "backward")):
        top = WHOLE + number * PASS
        write(axes, 4, top + 8, name, ha="left", bold=True)
        for rank, parts in enumerate(ranks):
            middle = top + 20 + MLP_LANE * (rank + 0.5)
            write(axes, 4, middle, f"rank {rank}", ha="left", size=13)
            _draw_rank(axes, middle, rank, parts, is_forward=number == 0)
        column = COLUMNS[7] if number == 0 else COLUMNS[1]
        box(axes, column, top + 22, BAR, 2 * MLP_LANE - 4, fill=PURPLE)
        middle = top + 20 + MLP_LANE
        look: dict[str, Any] = {"ha": "center", "va": "center", "rotation": 90, "size": 14}
        axes.text(column + BAR / 2, middle, "all-reduce", color=INK, **look)
    return figure


def _draw_rank(axes: Axes, middle: float, rank: int, parts: Parts, is_forward: bool) -> None:
    """Draw what a rank computes in a pass."""
    own, d = SPLIT[rank], "" if is_forward else "d"
    before, after = (GREEN, own) if is_forward else (own, GREEN)
    shapes = (
        (COLUMNS[0], parts.x, f"{d}X", GREEN),
        (COLUMNS[2], parts.x, "X" if is_forward else f"dX{rank}", before),
        (COLUMNS[3], parts.a, f"A{rank}", own),
        (COLUMNS[4], parts.h, f"{d}H{rank}", own),
        (COLUMNS[5], parts.b, f"B{rank}", own),
        (COLUMNS[6], parts.y, f"Y{rank}" if is_forward else "dY", after),
        (COLUMNS[8], parts.y, f"{d}Y", GREEN),
    )
    for left, shape, text, fill in shapes:
        matrix(axes, left, middle, shape, CELL, fill, text)
    ends = [(left, left + shape[1] * CELL) for left, shape, _, _ in shapes]
    bar = COLUMNS[7] if is_forward else COLUMNS[1]
    ends = sorted([*ends, (bar, bar + BAR)])
    for (_, end), (begin, _) in pairwise(ends):
        places = (end + 2, middle), (begin - 2, middle)
        arrow(axes, *(places if is_forward else places[::-1]))


def _draw_whole(axes: Axes, ranks: Sequence[Parts]) -> None:
    """Draw the matrices of the whole MLP, in the colours of the ranks that hold their parts."""
    middle, cell = WHOLE / 2 - 4, WHOLE_CELL
    write(axes, 4, middle, "whole", ha="left", bold=True)
    matrix(axes, 90, middle, ranks[0].x, cell, GREEN, "X")
    for rank, parts in enumerate(ranks):
        width = parts.a[1] * cell
        matrix(axes, 140 + rank * width, middle, parts.a, cell, SPLIT[rank], f"A{rank}")
        matrix(axes, 262 + rank * width, middle, parts.h, cell, SPLIT[rank], f"H{rank}")
        height = parts.b[0] * cell
        y = middle + (rank - (len(ranks) - 1) / 2) * height
        matrix(axes, 384, y, parts.b, cell, SPLIT[rank], f"B{rank}")
    matrix(axes, 432, middle, ranks[0].y, cell, GREEN, "Y")
    for x in (124, 237, 359, 417):
        arrow(axes, (x - 12, middle), (x + 10, middle))
