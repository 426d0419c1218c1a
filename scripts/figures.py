"""Draw the simulated runs that the guidelines show.

    python scripts/figures.py                 draws all of them
    python scripts/figures.py broadcast       only those whose names begin with broadcast

Each figure shows a function of ``scripts/phaseN.py``, run as ``distlab sim`` would run it, and is
written to ``phaseN_*/figures/NAME.svg``. figures.csv lists the figures. One more, of the
collectives, belongs to all phases and is written to ``docs/images``. The pictures in DRAWINGS are
drawn by functions of their own, from runs or from formulas.
"""

import csv
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import checkpoint_pictures
import layout_pictures
import memory_picture
import number_pictures
import recovery_pictures
import sharding_pictures
import zero_picture
from collectives_picture import Panel, picture
from matplotlib import figure as matplotlib_figure
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes

from distlab.explore import IDEAL
from distlab.sim import GPU, Cluster, Options, Simulated, simulate
from distlab.sim.device.device import Device
from distlab.sim.engine.clock import Clock
from distlab.sim.engine.trace import Event
from distlab.sim.hardware.topology import Place
from distlab.sim.results.diagram import space_time
from distlab.sim.script import run_script
from distlab.sim.simulation import Simulation

ROOT = Path(__file__).resolve().parents[1]
# Needless parts, half of each file: decimals after the second (but not in the size of letters),
# clip paths, and trailing spaces.
NEEDLESS = re.compile(r'(?<=\d\.\d\d)(?<!scale\(0\.\d\d)\d+| clip-path="[^"]*"| (?=\n)')


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
        cluster = self.cluster
        world = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
        return run_script(program, [self.subject], self.ranks, world, Options())

    @property
    def path(self) -> Path:
        """Path of the picture that the guidelines link to."""
        return _path_in_phase(self.phase, self.name)

    def draw(self) -> None:
        """Draw the picture."""
        self._save(space_time(self.run(), self.title))

    def _save(self, picture: matplotlib_figure.Figure) -> None:
        self.path.write_text(_svg_of(picture))


def _path_in_phase(phase: int, name: str) -> Path:
    """Return the path of a picture in a phase's folder."""
    (folder,) = ROOT.glob(f"phase{phase}_*")
    return folder / f"figures/{name}.svg"


def _svg_of(picture: matplotlib_figure.Figure) -> str:
    """Return a picture as the text of an SVG file, without what is needless."""
    file = io.StringIO()
    picture.savefig(file, format="svg", metadata={"Date": None})
    return NEEDLESS.sub("", file.getvalue())


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
            gib = [sum(kinds.values()) / 2**30 for kinds in held]
            axes.plot([1e3 * s for s in seconds], gib, label=label)
        axes.set(title=self.title, xlabel="virtual time (ms)", ylabel="GiB", ylim=(0, None))
        axes.legend()
        picture.savefig(self.path, metadata={"Date": None})

    def measure(self) -> list[list[memory_picture.Moment]]:
        """Return, for each rank, the time in seconds and the live bytes after every operation."""
        curves: list[list[memory_picture.Moment]] = [[] for _ in range(self.ranks)]
        make_devices = Simulation._make_devices

        def make_watched_devices(simulation: Simulation, places: Sequence[Place]) -> list[Device]:
            devices = [*make_devices(simulation, places)]
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
    curve: list[memory_picture.Moment],
    seconds: float,
    name: str,
) -> None:
    """Advance a device by the time of an operation, and record the memory in use after it."""
    advance(seconds, name)
    curve.append((clock.current.clock_s, device.memory.live_by_category))


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


@dataclass(frozen=True)
class WhereMemoryGoes(MemoryFigure):
    """Bars of a GPU's memory, estimated, and the memory of a step over time, measured."""

    def draw(self) -> None:
        """Draw both; the letters stay text, which a test can read."""
        with rc_context({"svg.fonttype": "none"}):
            self._save(self.picture())

    def picture(self) -> matplotlib_figure.Figure:
        """Return the picture, from a run of the last of the program's steps."""
        (moments,) = self.measure()
        held = [kinds["gradients"] for _, kinds in moments]
        starts = [n for n in range(1, len(held)) if held[n] == 0 < held[n - 1]]
        return memory_picture.picture(moments[starts[-1] :])


WHERE_MEMORY_GOES = WhereMemoryGoes(
    "where_memory_goes",
    "Where the memory goes",
    1,
    cluster="dgx-h100",
    subject="memory_of_two_steps",
    phase=2,
)


@dataclass(frozen=True)
class StreamsFigure(Figure):
    """A drawing of the first rank's host and streams, from its first wait for the GPU on."""

    def run(self) -> Simulated[None]:
        """Simulate the program ``subject`` on GPUs."""
        world = Cluster.preset(str(self.cluster))
        return run_script(ROOT / self.subject, [], self.ranks, world, Options(semantics="nccl"))

    def draw(self) -> None:
        """Draw a lane for the host and for each stream, and an arrow where one waits."""
        picture = matplotlib_figure.Figure(figsize=(12, 3), layout="constrained")
        axes, lanes = picture.subplots(), self._lanes()
        start_s = next(event.end_s for event in lanes["host"] if event.kind == "wait")
        for row, (lane, events) in enumerate(lanes.items()):
            for event in (event for event in events if event.start_s >= start_s):
                _draw_work(axes, row, event, start_s)
            axes.text(-1, row, LANES[lane], ha="right", va="center")
        _draw_event(axes, lanes, start_s)
        axes.set(title=self.title, xlabel="virtual time (µs)", ylim=(2.6, -0.6), yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
        self._save(picture)

    def _lanes(self) -> dict[str, list[Event]]:
        """Return the first rank's events by lane, in the order of LANES."""
        run, lanes = self.run(), {lane: list[Event]() for lane in LANES}
        for track, event in run.gpu_time.tracks if run.gpu_time else ():
            if event.rank == 0:
                lanes[track].append(event)
        on_streams = {event for events in lanes.values() for event in events}
        mine = {event for event in run.trace.events if event.rank == 0}
        lanes["host"] = sorted(mine - on_streams, key=lambda event: event.start_s)
        return lanes


LANES = {  # tracks, and what the picture calls them
    "host": "host",
    "cuda:0 default stream": "default stream",
    "cuda:0 NCCL": "NCCL's stream",
}
COLOURS = {"compute": "#3b6fb6", "wait": "#f2c9b0", "collective": "#e6842a"}


def _draw_work(axes: Axes, row: int, event: Event, start_s: float) -> None:
    """Draw an event as a bar, with its name if there is room for it."""
    left, width = 1e6 * (event.start_s - start_s), 1e6 * (event.end_s - event.start_s)
    colour = "#9aa5b1" if row == 0 and event.kind == "compute" else COLOURS[event.kind]
    axes.barh(row, width, left=left, height=0.6, color=colour, edgecolor="white")
    name = event.name.replace("host", "").removeprefix(".")
    if name and width > len(name):
        axes.text(left + width / 2, row, name, ha="center", va="center", fontsize=9)


def _draw_event(axes: Axes, lanes: dict[str, list[Event]], start_s: float) -> None:
    """Draw the event for which ``wait()`` makes the default stream wait."""
    _, computing, communicating = lanes.values()
    end_s = communicating[-1].end_s
    (waiting,) = (event for event in computing if abs(event.start_s - end_s) < 1e-9)
    x = 1e6 * (waiting.start_s - start_s)
    axes.annotate("", (x, 1.3), (x, 1.7), arrowprops={"arrowstyle": "-|>"})
    axes.text(x + 1, 1.5, "event", va="center", fontsize=9)


STREAMS = StreamsFigure(
    "what_wait_means",
    "wait() holds back a stream; item() holds back the host",
    2,
    cluster="dgx-h100",
    subject="examples/simulator/what_wait_means.py",
    phase=1,
)


@dataclass(frozen=True)
class CollectivesFigure(Figure):
    """A picture of what the ranks hold before and after each collective."""

    @property
    def path(self) -> Path:
        """Path of the picture, which docs/start.md shows."""
        return ROOT / f"docs/images/{self.name}.svg"

    def draw(self) -> None:
        """Draw a panel for each collective; the letters stay text, which a test can read."""
        with rc_context({"svg.fonttype": "none"}):
            self._save(picture(self.panels()))

    def panels(self) -> dict[str, Panel]:
        """Run the program's collectives, and return what each rank held before and after."""
        program = runpy.run_path(str(ROOT / self.subject))
        run = simulate(program["run_all"], self.ranks, cluster=self.cluster)
        return {name: [result[name] for result in run.results] for name in run.results[0]}


COLLECTIVES = CollectivesFigure(
    "collectives",
    "Before and after each collective",
    4,
    cluster="laptop",
    subject="examples/first_steps/collectives.py",
    phase=1,
)


@dataclass(frozen=True)
class ZeroFigure(Figure):
    """A picture of who holds which quarter of the model's state in each stage of ZeRO."""

    def draw(self) -> None:
        """Draw a panel for each stage; the letters stay text, which a test can read."""
        with rc_context({"svg.fonttype": "none"}):
            self._save(zero_picture.picture(self.stages()))

    def stages(self) -> list[list[zero_picture.Held]]:
        """Run a step with each stage, and return what every rank held."""
        program = runpy.run_path(str(ROOT / f"scripts/phase{self.phase}.py"))
        run = simulate(program[self.subject], self.ranks, cluster=self.cluster)
        return [list(ranks) for ranks in zip(*run.results, strict=True)]


ZERO = ZeroFigure(
    "zero_stages",
    "Who holds what in the stages of ZeRO",
    4,
    cluster="dgx-h100",
    subject="zero_stages",
    phase=3,
)


@dataclass(frozen=True)
class Drawing:
    """A picture that a function of its own draws; its letters stay text, which a test can read."""

    name: str
    phase: int
    make: Callable[[], matplotlib_figure.Figure]

    @property
    def path(self) -> Path:
        """Path of the picture that the guidelines link to."""
        return _path_in_phase(self.phase, self.name)

    def svg(self) -> str:
        """Return the picture as it is drawn now."""
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "figures"}):
            return _svg_of(self.make())

    def draw(self) -> None:
        """Draw the picture."""
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(self.svg())


DRAWINGS = (
    Drawing("gradient_range", 2, number_pictures.draw_ranges),
    Drawing("split_mlp", 2, layout_pictures.draw_split_mlp),
    Drawing("two_nodes", 3, layout_pictures.draw_nodes),
    Drawing("sharded_unit", 3, sharding_pictures.draw_sharded_unit),
    Drawing("safe_save", 4, checkpoint_pictures.draw_save),
    Drawing("async_saves", 4, checkpoint_pictures.draw_async_saves),
    Drawing("heartbeats", 4, recovery_pictures.draw_heartbeats),
    Drawing("elastic", 4, recovery_pictures.draw_elastic),
    Drawing("intervals", 4, checkpoint_pictures.draw_intervals),
)


def _listed() -> Iterator[Figure]:
    """Yield the figures of figures.csv."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter=";"):
            cluster = CLUSTERS.get(row["cluster"], row["cluster"])
            numbers = int(row["ranks"]), cluster, row["subject"], int(row["phase"])
            yield Figure(row["name"], row["title"], *numbers)


FIGURES: tuple[Figure | Drawing, ...] = (
    *_listed(),
    MEMORY,
    WHERE_MEMORY_GOES,
    STREAMS,
    COLLECTIVES,
    ZERO,
    *DRAWINGS,
)


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
