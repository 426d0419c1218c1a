"""distlab as ``pip install .`` leaves it: without pytest, and started anywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_PYTEST = "import sys; sys.modules['pytest'] = None; "  # as if it were not installed


def distlab(folder: Path, *arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"{before}from distlab.cli import main; main({list(arguments)})"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("command", ["check 1.4", "check 1.4 1.5", "grade", "watch 1.4"])
def test_without_pytest_a_grading_says_what_to_install(command: str) -> None:
    done = distlab(ROOT, *command.split(), before=NO_PYTEST)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "grading needs pytest, which is not installed here: pip install pytest\n"


@pytest.mark.parametrize("command", ["check 1.4", "grade", "trace 1.4", "status"])
def test_outside_of_the_course_it_says_where_to_go(tmp_path: Path, command: str) -> None:
    done = distlab(tmp_path, *command.split(), before=NO_PYTEST)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{tmp_path} is not in the course's folder: no course.toml here or above; cd {ROOT}\n"
    )
