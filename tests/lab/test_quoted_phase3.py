"""What the guidelines of Phase 3 quote is what ``scripts/phase3.py`` takes and sends."""

from functools import cache
from pathlib import Path

import pytest

from distlab.course import load
from distlab.sim import Cluster, Options, Simulated
from distlab.sim.results.summary import totals
from distlab.sim.script import run_script
from distlab.util.text import seconds_text

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)


def words(id: str) -> str:
    """The text of a task, without its line breaks."""
    task = COURSE.task(id)
    guide = (ROOT / task.folder / "guidelines.md").read_text(encoding="utf-8")
    section = guide.partition(f"\n## {task.heading}\n")[2].partition("\n## ")[0]
    return " ".join(section.split())


@cache
def simulated(subject: str, cluster: str, ranks: int) -> Simulated[None]:
    program = ROOT / "scripts/phase3.py"
    return run_script(program, [subject], ranks, Cluster.preset(cluster), Options())


# ring_allreduce


@pytest.mark.parametrize(
    ("id", "subject", "quoted"),
    [
        ("3.1", "ring_reduce_scatter", "282 µs"),
        ("3.3", "ring_all_reduce", "495 µs"),
        ("3.4", "segmented_ring", "435 µs"),
        ("3.4", "ring_all_reduce", "495 µs"),
        ("3.4", "short_segments", "629 µs"),
    ],
)
def test_seconds_of_a_ring_are_those_of_the_simulator(id: str, subject: str, quoted: str) -> None:
    assert seconds_text(simulated(subject, "dgx-h100", 4).seconds) == quoted
    assert quoted in words(id)


def test_seconds_of_messages_and_of_adding_are_those_of_rank_0() -> None:
    run = simulated("ring_reduce_scatter", "dgx-h100", 4)
    assert f"three steps take **{seconds_text(totals(run)[0].exposed_s)}**" in words("3.1")
    assert f"takes another {1e6 * run.trace.compute_s[0]:.0f} µs" in words("3.1")
    exposed_s = totals(simulated("ring_all_reduce", "dgx-h100", 8))[0].exposed_s
    assert f"= **{seconds_text(exposed_s)}**" in words("3.3")


def test_messages_of_segments_are_those_of_the_simulator() -> None:
    assert simulated("segmented_ring", "dgx-h100", 4).trace.messages == [24] * 4
    assert simulated("short_segments", "dgx-h100", 4).trace.messages == [150] * 4
    assert "in 24 messages per rank" in words("3.4")
    assert "there are 150 messages" in words("3.4")
