"""Figures in the guidelines of Phase 2 match those of ``scripts/phase2.py``."""

import math
import re
from pathlib import Path

import pytest

from distlab.course import load
from distlab.sim import Cluster, Options, Simulated
from distlab.sim.script import run_script
from distlab.util.text import bytes_text, seconds_text

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
ROW = re.compile(r"^(float\d\d.*?) +(\d\.\d\d) +(\d\.\d\d|nan)$", re.MULTILINE)


def section(id: str) -> str:
    task = COURSE.task(id)
    guide = (ROOT / task.folder / "guidelines.md").read_text(encoding="utf-8")
    return guide.partition(f"\n## {task.heading}\n")[2].partition("\n## ")[0]


def simulated(subject: str, cluster: str, ranks: int) -> Simulated[None]:
    program = ROOT / "scripts/phase2.py"
    return run_script(program, [subject], ranks, Cluster.preset(cluster), Options())


@pytest.mark.parametrize(
    ("id", "subject", "quoted"),
    [
        ("2.2", "accumulate_over_ranks", "287 µs"),
        ("2.4", "step_in_float16", "268 µs"),
        ("2.4", "step_in_float32", "331 µs"),
        ("2.8", "model_parallel", "2.00 ms"),
    ],
)
def test_seconds_under_a_picture_are_those_of_the_simulator(
    id: str, subject: str, quoted: str
) -> None:
    assert seconds_text(simulated(subject, "dgx-h100", 4).seconds) == quoted
    assert quoted in section(id)


@pytest.mark.parametrize(
    ("subject", "seconds", "peak"),
    [
        ("positions_kept", "66.1 ms", "4.40 GiB"),
        ("positions_gathered_again", "66.9 ms", "2.88 GiB"),
    ],
)
def test_positions_that_are_gathered_again_take_less_memory(
    subject: str, seconds: str, peak: str
) -> None:
    run, text = simulated(subject, "dgx-h100", 8), section("2.17")
    assert (seconds_text(run.seconds), bytes_text(run.trace.peak_bytes[0])) == (seconds, peak)
    assert {seconds, peak} <= {f"{a} {b}" for a, b in re.findall(r"([\d.]+)\s(ms|GiB)", text)}


def test_the_solution_waits_for_a_part_of_its_all_reduces() -> None:
    run = simulated("tensor_block", "dgx-h100", 4)
    for seconds in (run.seconds, run.trace.exposed_s[0]):
        assert seconds_text(seconds) in section("2.15")


def test_the_table_of_segments_is_the_one_that_is_printed() -> None:
    run = simulated("checkpoint_segments", "dgx-h100", 6)
    rows = re.findall(r"^   \d +(\S+ ms) .* (\S+ GiB) ", section("2.6"), re.MULTILINE)
    pairs = zip(run.trace.compute_s, run.trace.peak_bytes, strict=True)
    assert rows == [(seconds_text(seconds), bytes_text(peak)) for seconds, peak in pairs]


def losses(text: str) -> dict[str, tuple[float, float]]:
    return {name: (float(first), float(last)) for name, first, last in ROW.findall(text)}


def test_plain_float16_diverges_and_the_lesson_converges(
    capfd: pytest.CaptureFixture[str],
) -> None:
    simulated("precisions", "laptop", 2)
    found, quoted = losses(capfd.readouterr().out), losses(section("2.4"))
    assert list(found) == list(quoted)
    assert len(found) == 4
    for name, (first, last) in quoted.items():
        # Without scaling, training depends on the last bits of tiny gradients, which differ by CPU.
        tolerance = 2.0 if name == "float16, scale 1" else 0.02
        assert found[name][0] == pytest.approx(first, abs=0.02)
        assert found[name][1] == pytest.approx(last, abs=tolerance, nan_ok=True)
    assert math.isnan(found["float16 everywhere"][1])
    assert found["float16, scale 1"][1] > 10 * found["float32"][1]
    assert found["float16, scaled"][1] == pytest.approx(found["float32"][1], abs=0.01)
