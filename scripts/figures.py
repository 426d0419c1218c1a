"""Draw the simulated runs that the guidelines show.

    python scripts/figures.py                 all of them
    python scripts/figures.py broadcast       those whose names begin so

Each is a subject of ``scripts/phaseN.py``, run as ``distlab sim`` runs it, and goes to
``phaseN_*/figures/NAME.svg``.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from matplotlib import figure as matplotlib_figure
from matplotlib import rcParams

from distlab.explore import IDEAL
from distlab.sim import GPU, Cluster, Options, Simulated
from distlab.sim.results.diagram import space_time
from distlab.sim.script import run_script
from distlab.sim.simulation import Simulation

ROOT = Path(__file__).resolve().parents[1]
# Half of a file: digits beyond hundredths of a point, clipping at the edge, blanks at line ends.
NEEDLESS = re.compile(r'(?<=\d\.\d\d)\d+| clip-path="[^"]*"| (?=\n)')


SLOW_LINKS = Cluster(  # a unit takes a third of the time to travel that it takes to compute
    1,
    2,
    latency_s=1e-6,
    nvlink_bytes_per_s=16e9,
    gpu=GPU("toy", 1e15, 1e30, {"float32": 1e12}, {"float32": 1e12}),
)


@dataclass(frozen=True)
class Figure:
    """A subject on a cluster, and what its picture is called."""

    name: str
    title: str
    ranks: int
    cluster: str | Cluster = "laptop"
    subject: str = ""  # the name, unless one subject has several pictures
    phase: int = 1

    def run(self) -> Simulated[None]:
        """Simulate it."""
        program = ROOT / f"scripts/phase{self.phase}.py"
        is_preset = isinstance(self.cluster, str)
        world = Cluster.preset(self.cluster) if is_preset else self.cluster
        return run_script(program, [self.subject or self.name], self.ranks, world, Options())

    def draw(self) -> Path:
        """Draw it where the guidelines look for it; return the file."""
        (folder,) = ROOT.glob(f"phase{self.phase}_*")
        path = folder / f"figures/{self.name}.svg"
        space_time(self.run(), self.title).savefig(path, metadata={"Date": None})
        path.write_text(NEEDLESS.sub("", path.read_text()))
        return path


@dataclass(frozen=True)
class MemoryFigure(Figure):
    """The memory that ranks hold over the virtual time, a curve for each rank that has a label."""

    labels: tuple[tuple[int, str], ...] = ()

    def draw(self) -> Path:
        """Draw it as ``Figure`` does."""
        picture = matplotlib_figure.Figure(figsize=(10, 4), layout="constrained")
        axes = picture.subplots()
        curves = self._measure()
        for rank, label in self.labels:
            seconds, held = zip(*curves[rank], strict=True)
            axes.plot([1e3 * s for s in seconds], [n / 2**30 for n in held], label=label)
        axes.set(title=self.title, xlabel="virtual time (ms)", ylabel="GiB", ylim=(0, None))
        axes.legend()
        (folder,) = ROOT.glob(f"phase{self.phase}_*")
        path = folder / f"figures/{self.name}.svg"
        picture.savefig(path, metadata={"Date": None})
        return path

    def _measure(self) -> dict[int, list[tuple[float, int]]]:
        """Return seconds and live bytes after every operation, by rank."""
        curves: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(self.ranks)}
        compute = Simulation.compute

        def note(simulation: Simulation, seconds: float, name: str) -> None:
            compute(simulation, seconds, name)
            rank = simulation.scheduler.current
            live_bytes = simulation._devices[rank.number].memory.live_bytes
            curves[rank.number].append((rank.clock_s, live_bytes))

        with patch.object(Simulation, "compute", note):
            self.run()
        return curves


FIGURES = (
    Figure("scatter_batch", "Rank 0 deals a batch: first shapes, then images and labels", 4),
    Figure("exchange", "One step around a ring: all send right and receive from the left", 4),
    Figure("broadcast", "Broadcast: every round doubles the number of ranks that have it", 8),
    Figure("all_reduce_naive", "All-reduce through rank 0: seven receives, then a broadcast", 8),
    Figure(
        "all_reduce_recursive_doubling",
        "Recursive doubling among 8: partners at distance 1, 2 and 4",
        8,
    ),
    Figure(
        "all_reduce_recursive_doubling_6",
        "Recursive doubling among 6: ranks 4 and 5 go through 0 and 1",
        6,
        subject="all_reduce_recursive_doubling",
    ),
    Figure(
        "train_step",
        "A training step: forward, backward, one all-reduce per gradient",
        4,
        cluster="dgx-h100",
    ),
    # gradient_accumulation
    Figure(
        "accumulate_over_ranks",
        "4, 3, 4 and 2 micro-batches, then one all-reduce of all gradients",
        4,
        cluster="dgx-h100",
        phase=2,
    ),
    # mixed_precision
    Figure(
        "step_in_float16",
        "A step in mixed precision: three all-reduces, the last of one number",
        4,
        cluster="dgx-h100",
        phase=2,
    ),
    # activation_checkpointing
    MemoryFigure(
        "checkpoint_segments",
        "Memory in a step of 36 layers",
        6,
        cluster="dgx-h100",
        phase=2,
        labels=(
            (0, "everything is kept"),
            (1, "36 segments of 1 layer"),
            (3, "6 segments of 6 layers"),
            (5, "1 segment of 36 layers"),
        ),
    ),
    # model_parallel
    Figure(
        "model_parallel",
        "Four stages: one rank computes, the other three wait",
        4,
        cluster="dgx-h100",
        phase=2,
    ),
    # pipeline_parallel
    Figure(
        "gpipe",
        "GPipe, 4 stages: eight micro-batches forward, then all of them backward",
        4,
        cluster=IDEAL,
        phase=2,
    ),
    Figure(
        "one_f_one_b",
        "1F1B, 4 stages: no longer than GPipe, but at most 4 micro-batches are in flight",
        4,
        cluster=IDEAL,
        phase=2,
    ),
    Figure(
        "interleaved",
        "Interleaved 1F1B, 4 stages of 2 chunks: half of the bubble",
        4,
        cluster=IDEAL,
        phase=2,
    ),
    # tensor_parallel
    Figure(
        "tensor_block",
        "A block on 4 GPUs: two all-reduces forward, and two backward",
        4,
        cluster="dgx-h100",
        phase=2,
    ),
    Figure(
        "sequence_block",
        "The same with split positions: all-gathers and reduce-scatters",
        4,
        cluster="dgx-h100",
        phase=2,
    ),
    # ring_allreduce
    Figure(
        "ring_all_reduce",
        "All-reduce around a ring of 4: in three steps chunks are added, in three collected",
        4,
        cluster="dgx-h100",
        phase=3,
    ),
    Figure(
        "segmented_ring",
        "The same in segments: while a rank adds one, the next is on its way",
        4,
        cluster="dgx-h100",
        phase=3,
    ),
    # tree_allreduce
    Figure(
        "tree_all_reduce",
        "Along a tree, 8 ranks: three rounds up to rank 0, three rounds down",
        8,
        phase=3,
    ),
    Figure(
        "double_tree_in_segments",
        "Along two trees, 6 ranks: four segments of each half go up, then down",
        6,
        phase=3,
    ),
    # topology
    Figure(
        "hierarchical_all_reduce",
        "Two nodes of 4 GPUs: only two of the eight rounds cross between them",
        8,
        cluster=Cluster(2, 4),
        phase=3,
    ),
    # ddp
    Figure(
        "ddp",
        "Eight broadcasts, then a step: buckets travel during the backward pass",
        4,
        cluster="dgx-h100",
        phase=3,
    ),
    # parameter_server
    Figure(
        "bounded_staleness",
        "Staleness 2: rank 3 is four times slower, and the others wait from their third on",
        4,
        phase=3,
    ),
    # zero
    Figure(
        "fully_sharded",
        "Four units on 2 ranks: the next one is on its way while one computes",
        2,
        cluster=SLOW_LINKS,
        phase=3,
    ),
)


def main() -> None:
    """Draw those that were named."""
    rcParams["svg.hashsalt"] = "figures"  # the same run gives the same file
    for figure in FIGURES:
        if figure.name.startswith(tuple(sys.argv[1:]) or ""):
            print(figure.draw().relative_to(ROOT))


if __name__ == "__main__":
    main()
