"""What the guidelines quote of links of two speeds is what comes out."""

from pathlib import Path

import pytest

from distlab.sim import Cluster, Options
from distlab.sim.script import run_script
from distlab.util.text import seconds_text

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("subject", "quoted"),
    [("hierarchical_all_reduce", "take 110 µs"), ("flat_ring", "a flat ring takes 420 µs")],
)
def test_seconds_under_the_picture_are_those_of_the_simulator(subject: str, quoted: str) -> None:
    run = run_script(ROOT / "scripts/phase3.py", [subject], 8, Cluster(2, 4), Options())
    assert quoted.endswith(seconds_text(run.seconds))
    assert quoted in (ROOT / "phase3_multi_node/guidelines.md").read_text(encoding="utf-8")
