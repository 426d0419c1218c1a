"""Times quoted in the guidelines of Phase 3 match those of ``scripts/phase3.py``."""

from pathlib import Path

import pytest

from distlab.course import load
from distlab.sim import Cluster, Options
from distlab.sim.script import run_script
from distlab.util.text import seconds_text

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
H100, LAPTOP, TWO_NODES = Cluster.preset("dgx-h100"), Cluster.preset("laptop"), Cluster(2, 4)


def words(id: str) -> str:
    """Return a task's section of the guidelines, without line breaks."""
    task = COURSE.task(id)
    guide = (ROOT / task.folder / "guidelines.md").read_text(encoding="utf-8")
    section = guide.partition(f"\n## {task.heading}\n")[2].partition("\n## ")[0]
    return " ".join(section.split())


@pytest.mark.parametrize(
    ("id", "subject", "cluster", "ranks"),
    [
        ("3.1", "ring_reduce_scatter", H100, 4),
        ("3.2", "ring_all_reduce", H100, 4),
        ("3.3", "segmented_ring", H100, 4),
        ("3.3", "short_segments", H100, 4),
        ("3.4", "tree_all_reduce", LAPTOP, 8),
        ("3.7", "hierarchical_all_reduce", TWO_NODES, 8),
        ("3.7", "flat_ring", TWO_NODES, 8),
    ],
)
def test_seconds_are_those_of_the_simulator(
    id: str, subject: str, cluster: Cluster, ranks: int
) -> None:
    run = run_script(ROOT / "scripts/phase3.py", [subject], ranks, cluster, Options())
    assert seconds_text(run.seconds) in words(id)
