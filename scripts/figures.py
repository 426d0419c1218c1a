"""Draw the simulated runs that the guidelines show.

    python scripts/figures.py                 all of them
    python scripts/figures.py broadcast       those whose names begin so

Each is a subject of ``scripts/phaseN.py``, run as ``distlab sim`` runs it, and goes to
``phaseN_*/figures/NAME.svg``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rcParams

from distlab.sim import Cluster, Options, Simulated
from distlab.sim.diagram import space_time
from distlab.sim.script import run_script

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Figure:
    """A subject on a cluster, and what its picture is called."""

    name: str
    title: str
    ranks: int
    cluster: str = "laptop"
    subject: str = ""  # the name, unless one subject has several pictures
    phase: int = 1

    def run(self) -> Simulated[None]:
        """Simulate it."""
        program = ROOT / f"scripts/phase{self.phase}.py"
        world = Cluster.preset(self.cluster)
        return run_script(program, [self.subject or self.name], self.ranks, world, Options())

    def draw(self) -> Path:
        """Draw it where the guidelines look for it; return the file."""
        (folder,) = ROOT.glob(f"phase{self.phase}_*")
        path = folder / f"figures/{self.name}.svg"
        space_time(self.run(), self.title).savefig(path, metadata={"Date": None})
        return path


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
    # mixed_precision
    # activation_checkpointing
    # model_parallel
    # pipeline_parallel
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
)


def main() -> None:
    """Draw those that were named."""
    rcParams["svg.hashsalt"] = "figures"  # the same run gives the same file
    for figure in FIGURES:
        if figure.name.startswith(tuple(sys.argv[1:]) or ""):
            print(figure.draw().relative_to(ROOT))


if __name__ == "__main__":
    main()
