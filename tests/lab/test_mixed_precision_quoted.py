"""What section 2.5 of the guidelines quotes is what ``scripts/phase2.py`` prints and takes."""

import math
import re
from pathlib import Path

import pytest

from distlab.course import load
from distlab.sim import Cluster, Options, Simulated
from distlab.sim.script import run_script
from distlab.words import seconds_text

ROOT = Path(__file__).parents[2]
TASK = load(ROOT).task("2.5")
GUIDE = (ROOT / TASK.folder / "guidelines.md").read_text(encoding="utf-8")
SECTION = GUIDE.partition(f"\n## {TASK.heading}\n")[2].partition("\n## ")[0]
ROW = re.compile(r"^(float\d\d.*?) +(\d\.\d\d) +(\d\.\d\d|nan)$", re.MULTILINE)


def simulated(subject: str, cluster: str, ranks: int) -> Simulated[None]:
    program = ROOT / "scripts/phase2.py"
    return run_script(program, [subject], ranks, Cluster.preset(cluster), Options())


@pytest.mark.parametrize(
    ("subject", "quoted"), [("step_in_float16", "216 µs"), ("step_in_float32", "279 µs")]
)
def test_seconds_under_the_picture_are_those_of_the_simulator(subject: str, quoted: str) -> None:
    assert seconds_text(simulated(subject, "dgx-h100", 4).seconds) == quoted
    assert quoted in SECTION


def losses(text: str) -> dict[str, tuple[float, float]]:
    return {name: (float(first), float(last)) for name, first, last in ROW.findall(text)}


def test_plain_float16_diverges_and_the_lesson_converges(
    capfd: pytest.CaptureFixture[str],
) -> None:
    simulated("precisions", "laptop", 2)
    found, quoted = losses(capfd.readouterr().out), losses(SECTION)
    assert list(found) == list(quoted)
    assert len(found) == 4
    for name, (first, last) in quoted.items():
        # Without scaling, training hangs on the last bits of tiny gradients: they differ by CPU.
        tolerance = 2.0 if name == "float16, scale 1" else 0.02
        assert found[name][0] == pytest.approx(first, abs=0.02)
        assert found[name][1] == pytest.approx(last, abs=tolerance, nan_ok=True)
    assert math.isnan(found["float16 everywhere"][1])
    assert found["float16, scale 1"][1] > 10 * found["float32"][1]
    assert found["float16, scaled"][1] == pytest.approx(found["float32"][1], abs=0.01)
