"""A suite that cannot be collected is no verdict on the submission: no success, no points."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_collection_error_is_neither_success_nor_a_zero(tmp_path: Path) -> None:
    suite, report = tmp_path / "test_broken.py", tmp_path / "report.json"
    suite.write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", str(suite), "-q", "--impl", "solution"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--report", f"json={report}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stdout
    assert "no_such_module" in ended.stdout
    assert not report.exists(), "a report would be read as a verdict"


def test_one_test_asked_for_by_name_does_not_earn_the_points_of_its_task() -> None:
    test = "tests/test_phase1.py::test_a_ring_exchanges_without_deadlock"
    command = [sys.executable, "-m", "pytest", test, "-q", "--impl", "solution"]
    ended = subprocess.run(
        [*command, "--backend", "sim"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1, ended.stdout
    assert "not all tests of the task were run: no points" in ended.stdout
