"""The script in docs/grading.md: whatever the grader does, Gradescope gets the truth."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "grading.md"
LIE = '{"score": 100}'


def ended(folder: Path, grader: str) -> Any:
    """Run the script inside ``folder`` with a stand-in for the grader; return the results."""
    (text,) = re.findall(r"```bash\n(#!/usr.*?)```", GUIDE.read_text(), re.DOTALL)
    for name in ("results", "submission", "course", "bin"):
        (folder / name).mkdir()
    (folder / "submission" / "collectives.py").touch()
    (folder / "results" / "results.json").write_text(LIE)
    command = folder / "bin" / "distlab"
    command.write_text(f"#!/bin/sh\nresults={folder}/results/results.json\n{grader}\n")
    command.chmod(0o755)
    script = text.replace("/autograder", str(folder))
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script], check=True, env=env)
    return json.loads((folder / "results" / "results.json").read_text())


@pytest.mark.parametrize("code", [0, 1])
def test_a_grade_is_left_as_it_is(tmp_path: Path, code: int) -> None:
    found = ended(tmp_path, f"""echo '{{"score": 7}}' > $results; exit {code}""")
    assert found == {"score": 7}


@pytest.mark.parametrize("grader", [f"echo '{LIE}' > $results; exit 3", "exit 4", "kill -9 $$"])
def test_a_failed_run_is_a_failure_that_says_so(tmp_path: Path, grader: str) -> None:
    found = ended(tmp_path, grader)
    assert found["score"] == 0
    assert "The autograder failed (exit code" in found["output"]
    assert "not a grade" in found["output"]


def test_success_without_a_report_is_a_failure(tmp_path: Path) -> None:
    assert ended(tmp_path, "exit 0")["score"] == 0
