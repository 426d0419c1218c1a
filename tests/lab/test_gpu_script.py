"""benchmarks/gpu.py in its dry form: all that can be said of it without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_lessons_run_and_agree_with_themselves(tmp_path: Path) -> None:
    parts = ["costs", "tokens", "lessons"]
    command = [sys.executable, "benchmarks/gpu.py", str(tmp_path), *parts, "--dry"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [found[part]["exit"] for part in parts] == [0, 0, 0], [found[p]["log"] for p in parts]
    assert found["tokens"]["tokens"]["failed"] == {}
    results = {name: what for name, what in found["lessons"].items() if ": " in name}
    assert {name.partition(":")[0] for name in results} >= {"gloo, 2 ranks", "sim, 2 ranks"}
    apart = {name: what for name, what in results.items() if not what.get("difference", 1) < 1e-5}
    assert apart == {}
