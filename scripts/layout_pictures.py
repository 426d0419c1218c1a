"""Pictures of where GPUs, links and parts of matrices are, for ``scripts/figures.py``."""

from drawing import BLUE, FAINT, GREEN, GREY, box, canvas, line, write
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from distlab.sim import Cluster

# --- 3.7: two nodes -------------------------------------------------------------------------------

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
