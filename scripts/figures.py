"""Draw the simulated runs that the guidelines show.

    python scripts/figures.py                 draws all of them
    python scripts/figures.py broadcast       only those whose names begin with broadcast

Each figure shows a function of ``scripts/phaseN.py``, run as ``distlab sim`` would run it, and is
written to ``phaseN_*/figures/NAME.svg``. figures.csv lists the figures.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from matplotlib import figure as matplotlib_figure
from matplotlib import rcParams

from distlab.explore import IDEAL
from distlab.sim import GPU, Cluster, Options, Simulated
from distlab.sim.device.device import Device
from distlab.sim.engine.clock import Clock
from distlab.sim.results.diagram import space_time
from distlab.sim.script import run_script
from distlab.sim.simulation import Simulation

ROOT = Path(__file__).resolve().parents[1]
# Needless parts, half of each file: decimals after the second, clip paths, and trailing spaces.
NEEDLESS = re.compile(r'(?<=\d\.\d\d)\d+| clip-path="[^"]*"| (?=\n)')


SLOW_LINKS = Cluster(  # sending a unit of ``fully_sharded`` takes a third as long as computing it
    1,
    2,
    latency_s=1e-6,
    nvlink_bytes_per_s=16e9,
    gpu=GPU("toy", 1e15, 1e30, {"float32": 1e12}, {"float32": 1e12}),
)


CLUSTERS = {"ideal": IDEAL, "slow links": SLOW_LINKS, "two nodes": Cluster(2, 4)}


@dataclass(frozen=True)
class Figure:
    """A phase script's function to run on a cluster, and the name and title of its picture."""

    name: str
    title: str
    ranks: int
    cluster: str | Cluster
    subject: str
    phase: int

    def run(self) -> Simulated[None]:
        """Simulate the function ``subject``."""
        program = ROOT / f"scripts/phase{self.phase}.py"
        is_preset = isinstance(self.cluster, str)
        world = Cluster.preset(self.cluster) if is_preset else self.cluster
        return run_script(program, [self.subject], self.ranks, world, Options())

    @property
    def path(self) -> Path:
        """Path of the picture that the guidelines link to."""
        (folder,) = ROOT.glob(f"phase{self.phase}_*")
        return folder / f"figures/{self.name}.svg"

    def draw(self) -> None:
        """Draw the picture."""
        space_time(self.run(), self.title).savefig(self.path, metadata={"Date": None})
        self.path.write_text(NEEDLESS.sub("", self.path.read_text()))


@dataclass(frozen=True)
class MemoryFigure(Figure):
    """A drawing of ranks' memory over virtual time, with a curve for each labelled rank."""

    labels: tuple[tuple[int, str], ...] = ()

    def draw(self) -> None:
        """Draw the curves."""
        picture = matplotlib_figure.Figure(figsize=(10, 4), layout="constrained")
        axes = picture.subplots()
        curves = self.measure()
        for rank, label in self.labels:
            seconds, held = zip(*curves[rank], strict=True)
            axes.plot([1e3 * s for s in seconds], [n / 2**30 for n in held], label=label)
        axes.set(title=self.title, xlabel="virtual time (ms)", ylabel="GiB", ylim=(0, None))
        axes.legend()
        picture.savefig(self.path, metadata={"Date": None})

    def measure(self) -> list[list[tuple[float, int]]]:
        """Return, for each rank, the time in seconds and the live bytes after every operation."""
        curves: list[list[tuple[float, int]]] = [[] for _ in range(self.ranks)]
        make_devices = Simulation._make_devices

        def make_watched_devices(simulation: Simulation) -> list[Device]:
            devices = make_devices(simulation)
            for device, curve in zip(devices, curves, strict=True):
                device.advance = partial(_advance, device, device.advance, simulation.clock, curve)
            return devices

        with patch.object(Simulation, "_make_devices", make_watched_devices):
            self.run()
        return curves


def _advance(
    device: Device,
    advance: Callable[[float, str], object],
    clock: Clock,
    curve: list[tuple[float, int]],
    seconds: float,
    name: str,
) -> None:
    """Advance a device by the time of an operation, and record the memory in use after it."""
    advance(seconds, name)
    curve.append((clock.current.clock_s, device.memory.live_bytes))


MEMORY = MemoryFigure(
    "checkpoint_segments",
    "Memory in a step of 36 layers",
    6,
    cluster="dgx-h100",
    subject="checkpoint_segments",
    phase=2,
    labels=(
        (0, "everything is kept"),
        (1, "36 segments of 1 layer"),
        (3, "6 segments of 6 layers"),
        (5, "1 segment of 36 layers"),
    ),
)


def _listed() -> Iterator[Figure]:
    """Yield the figures of figures.csv."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter=";"):
            cluster = CLUSTERS.get(row["cluster"], row["cluster"])
            numbers = int(row["ranks"]), cluster, row["subject"], int(row["phase"])
            yield Figure(row["name"], row["title"], *numbers)


FIGURES = (*_listed(), MEMORY)


def main() -> None:
    """Draw the figures whose names begin with one of the arguments; without arguments, all."""
    starts = tuple(sys.argv[1:]) or ("",)
    if not any(figure.name.startswith(starts) for figure in FIGURES):
        sys.exit(f"no figure begins with {' or '.join(starts)}; scripts/figures.csv lists them")
    rcParams["svg.hashsalt"] = "figures"  # makes the same run give the same file
    for figure in FIGURES:
        if figure.name.startswith(starts):
            figure.draw()
            print(figure.path.relative_to(ROOT))


if __name__ == "__main__":
    main()
