"""How long do ring.py and tree.py take on 2 to 64 simulated GPUs, and when does the tree win?

python examples/simulator/ring_against_tree.py --plot out/ring_against_tree.png
"""

import argparse
from collections.abc import Callable, Sequence
from math import log2
from typing import NamedTuple

import ring
import torch
import tree
from matplotlib.figure import Figure
from torch import Tensor

from distlab.sim import Cluster, Options, simulate
from distlab.util.text import bytes_text, seconds_text

PRESET = "gb200-nvl72"  # 72 GPUs on one switch: α and β are the same between any two
CLUSTER = Cluster.preset(PRESET)
ALPHA_S, BETA_S = CLUSTER.latency_s, 1 / CLUSTER.nvlink_bytes_per_s
NETWORK_ONLY = Options(has_devices=False)  # so that additions take no time
GPUS = (2, 4, 8, 16, 32, 64)
SIZES = (64 * 2**10, 64 * 2**20)  # in bytes: a small one and a large one


class Row(NamedTuple):
    """Simulated seconds on ``gpus`` GPUs, for each of SIZES."""

    gpus: int
    ring_s: list[float]
    tree_s: list[float]

    def crossing_bytes(self) -> float:
        """Return the size at which lines through the two times meet; 0 if the tree never wins."""
        small, large = (r - t for r, t in zip(self.ring_s, self.tree_s, strict=True))
        return max(0.0, SIZES[0] + (SIZES[1] - SIZES[0]) * small / (small - large))


def ring_s(p: int, n: float) -> float:
    """Return the seconds that the formula gives for the ring."""
    return 2 * (p - 1) * (ALPHA_S + n / p * BETA_S)


def tree_s(p: int, n: float) -> float:
    """Return the seconds that the formula gives for the tree."""
    return 2 * log2(p) * (ALPHA_S + n * BETA_S)


def crossing_bytes(p: int) -> float:
    """Return the size at which the two formulas are equal; 0 if the tree never wins."""
    return ALPHA_S / BETA_S * (p - 1 - log2(p)) / (log2(p) - (p - 1) / p)


def simulated_s(all_reduce: Callable[[Tensor], None], gpus: int) -> list[float]:
    """Return the simulated seconds for an all-reduce of each size, on tensors without data."""

    def run(num_bytes: int) -> None:
        all_reduce(torch.empty(num_bytes // 4, device="meta"))

    return [
        simulate(run, gpus, size, cluster=CLUSTER, options=NETWORK_ONLY).seconds for size in SIZES
    ]


def print_table(rows: Sequence[Row]) -> None:
    """Print the times, and the sizes at which ring and tree take equally long."""
    heads = "".join(f"{bytes_text(size):>22}" for size in SIZES)
    print(f"simulated, preset {PRESET}, not measured; adding up takes no time")
    print(f"    {heads}    the tree wins below")
    print("GPUs" + f"{'ring':>11}{'tree':>11}" * 2 + f"{'simulated':>13}{'formula':>11}")
    for row in rows:
        times = (row.ring_s[0], row.tree_s[0], row.ring_s[1], row.tree_s[1])
        simulated, expected = size_text(row.crossing_bytes()), size_text(crossing_bytes(row.gpus))
        cells = "".join(f"{seconds_text(time):>11}" for time in times)
        print(f"{row.gpus:>4}{cells}{simulated:>13}{expected:>11}")


def size_text(num_bytes: float) -> str:
    """Return the size below which the tree wins, as text."""
    return bytes_text(num_bytes) if num_bytes >= 1 else "never"


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw the simulated times as points and the formulas as lines, a panel for each size."""
    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    figure.suptitle(f"simulated, preset {PRESET}, not measured", fontsize=9, color="#555555")
    for i, axes in enumerate(figure.subplots(1, 2)):
        for name, formula, colour in (("ring", ring_s, "#3b6fb6"), ("tree", tree_s, "#e6842a")):
            points = [1e6 * getattr(row, f"{name}_s")[i] for row in rows]
            line = [1e6 * formula(p, SIZES[i]) for p in GPUS]
            axes.plot(GPUS, line, color=colour, linewidth=1, label=f"{name}, formula")
            axes.plot(GPUS, points, "o", color=colour, label=f"{name}, simulated")
        axes.set(title=f"all-reduce of {bytes_text(SIZES[i])}", xlabel="GPUs", xscale="log")
        axes.set(ylabel="virtual time (µs)", ylim=(0, None))
        axes.set_xticks(GPUS, map(str, GPUS))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"{path}: the same as a picture")


def main() -> None:
    """Simulate both all-reduces, print a table of the times, and draw it on request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", metavar="FILE", help="draw the table")
    path = parser.parse_args().plot
    rows = [Row(p, simulated_s(ring.all_reduce, p), simulated_s(tree.all_reduce, p)) for p in GPUS]
    print_table(rows)
    if path:
        draw(rows, path)


if __name__ == "__main__":
    main()
