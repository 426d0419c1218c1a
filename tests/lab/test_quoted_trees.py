"""What the guidelines of 3.5 and 3.6 quote is what runs take, and what the formulas say."""

from math import ceil, log2
from pathlib import Path

import pytest

from distlab.course import load
from distlab.sim import Cluster, Options
from distlab.sim.script import run_script
from distlab.util.text import seconds_text

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
ALPHA, BETA = 50e-6, 1 / 2.41e9  # of the preset laptop
SMALL, LARGE = 4 * 65_994, 4 * 25_557_032  # bytes


def words(id: str) -> str:
    """The text of a task, without its line breaks."""
    task = COURSE.task(id)
    guide = (ROOT / task.folder / "guidelines.md").read_text(encoding="utf-8")
    section = guide.partition(f"\n## {task.heading}\n")[2].partition("\n## ")[0]
    return " ".join(section.split())


def ring(num_bytes: int, n: int) -> float:
    return 2 * (n - 1) * (ALPHA + num_bytes * BETA / n)


def tree(num_bytes: int, n: int) -> float:
    return 2 * ceil(log2(n)) * (ALPHA + num_bytes * BETA)


def two_trees(num_bytes: int, n: int) -> float:
    num_segments = ceil(num_bytes / 2 / 2**19)
    return 2 * (num_segments + ceil(log2(n)) - 1) * (ALPHA + num_bytes * BETA / num_segments)


@pytest.mark.parametrize(
    ("subject", "ranks", "seconds"),
    [
        ("tree_all_reduce", 8, tree(SMALL, 8)),
        ("double_tree_in_segments", 6, 10 * (ALPHA + SMALL * BETA / 4)),
        ("double_tree_large", 8, two_trees(LARGE, 8)),
    ],
)
def test_the_simulator_takes_as_long_as_the_formulas_say(
    subject: str, ranks: int, seconds: float
) -> None:
    program = ROOT / "scripts/phase3.py"
    run = run_script(program, [subject], ranks, Cluster.preset("laptop"), Options())
    assert run.seconds == pytest.approx(seconds, rel=1e-3)


def test_seconds_of_one_tree_are_those_of_the_formulas() -> None:
    text = words("3.5")
    assert f"**{seconds_text(tree(SMALL, 8))}**" in text
    assert f"the ring's {seconds_text(ring(SMALL, 8))}." in text
    assert f"{1e3 * tree(SMALL, 1024):.1f} ms, where the ring takes" in text
    assert f"the ring takes {1e3 * ring(SMALL, 1024):.0f} ms." in text


def test_table_of_two_trees_is_that_of_the_formulas() -> None:
    text = words("3.6")
    for name, formula in (("ring (3.3)", ring), ("tree (3.5)", tree), ("two trees", two_trees)):
        cells = " | ".join(f"{1e3 * formula(LARGE, n):.0f} ms" for n in (8, 64, 1024))
        assert f"| {name} | {cells} |" in text
