"""benchmarks/gpu.py --dry, which runs as much as is possible without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

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
