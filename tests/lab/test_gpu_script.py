"""benchmarks/gpu.py --dry, which runs as much as is possible without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_it_measures_and_trains(tmp_path: Path) -> None:
    parts = ["tokens", "several"]
    command = [sys.executable, "benchmarks/gpu.py", str(tmp_path), "--dry", *parts]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [found[part]["exit"] for part in parts] == [0, 0], [found[p]["log"] for p in parts]
    assert found["tokens"]["tokens"]["failed"] == {}
    assert found["several"]["trainer, images"]["exit"] == 0
    assert len(found["several"]["GB/s, measured and simulated"]) == 5


def test_without_a_gpu_it_says_so_at_once(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "benchmarks/gpu.py", str(tmp_path / "gpu")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.startswith("torch sees no GPU here")) == (1, True)
    assert not (tmp_path / "gpu").exists()


def test_training_steps_wait_for_a_gpu_as_rarely_as_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import lesson_costs

    once = ("1.11", "1.12", "4.7", "4.15")  # a loss or an answer, at the end
    twice = ("2.1", "2.2")  # the number of targets before the passes, and the loss
    never = ("2.5", "2.15", "2.17", "3.11", "3.12", "3.13", "3.14", "4.4", "4.13")
    expected = dict.fromkeys(once, 1) | dict.fromkeys(twice, 2) | dict.fromkeys(never, 0)
    expected |= {"2.4": 3, "2.10": 3}
    counted = {name: max(lesson_costs.run_calls(name, 4, 2).results) for name in expected}
    assert counted == expected
