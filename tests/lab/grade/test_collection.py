"""Runs of pytest: the tasks graded, the output, and the exit code."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import COURSE, PHASE, ROOT
from processes import FreshPytest

from distlab.grade import reports, suites
from distlab.grade.results import GradeResult

SUITE = "tests/test_phase1.py"
MY_SUITE = """
from distlab.grade import check, task

def nothing(lesson):
    return 1

@task("1.3")
def test_that_breaks(grade):
    {body}

@task("1.4")
def test_that_passes(grade):
    grade.call(nothing)
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pytest_run(fresh_pytest: FreshPytest) -> Run:
    def run(
        *arguments: object, suite: object = SUITE, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        configuration = ("-c", ROOT / "pyproject.toml")
        options = ("--impl", "solution", "--backend", "sim")
        return fresh_pytest(suite, "-q", *configuration, *options, *arguments, **environment)

    return run


def my_suite(folder: Path, body: str) -> Path:
    path = folder / "test_mine.py"
    path.write_text(MY_SUITE.format(body=body))
    return path


def test_a_collection_error_is_neither_success_nor_a_zero(pytest_run: Run, tmp_path: Path) -> None:
    suite, report = tmp_path / "test_broken.py", tmp_path / "report.json"
    suite.write_text("import no_such_module\n")
    # The report of an earlier run must not be taken for one of this run.
    report.write_text(reports.FORMATS["gradescope"](GradeResult("here", [], 1.0)))
    ended = pytest_run("--report", f"gradescope={report}", suite=suite)
    assert ended.returncode == 2, ended.stdout
    assert "no_such_module" in ended.stdout
    assert not report.exists(), "a report would be read as a verdict"


def test_one_test_asked_for_by_name_does_not_earn_the_points_of_its_task(
    pytest_run: Run, tmp_path: Path
) -> None:
    test, junit = f"{SUITE}::test_exchange_inside_a_group", tmp_path / "junit.xml"
    ended = pytest_run("--report", f"junit={junit}", suite=test)
    assert ended.returncode == 1, ended.stdout
    assert "not all tests of the task were run, and what they decide scores nothing" in ended.stdout
    assert "broadcast" not in ended.stdout, "only what was asked for is in the table"
    (task,) = ET.parse(junit).getroot()
    assert (task.get("name"), task.get("errors")) == ("1.3 exchange", "1"), "CI must not be green"


def test_tasks_are_picked_by_their_ids(pytest_run: Run) -> None:
    ended = pytest_run("-k", "1.1 or 1.3", "--collect-only")
    assert ended.returncode == 5, ended.stdout
    tests = re.findall(r"::(\w+)", ended.stdout)
    assert {"test_ranks_take_turns", "test_exchange_inside_a_group"} <= set(tests)
    assert "broadcast" not in ended.stdout
    assert "total" not in ended.stdout


def test_an_error_of_the_grader_ends_with_its_own_code(pytest_run: Run, tmp_path: Path) -> None:
    suite, report = my_suite(tmp_path, "raise KeyError('mine')"), tmp_path / "report.json"
    ended = pytest_run("--report", f"json={report}", suite=suite)
    assert ended.returncode == 3, ended.stdout
    found = {task["id"]: task["outcome"] for task in json.loads(report.read_text())["tasks"]}
    assert (found["1.3"], found["1.4"]) == ("grader error", "passed")


def test_tests_that_pytest_left_out_are_not_run(pytest_run: Run, tmp_path: Path) -> None:
    suite, report = my_suite(tmp_path, "check(False, 'wrong')"), tmp_path / "report.json"
    ended = pytest_run("-x", "-k", "1.3 or 1.4", "--report", f"json={report}", suite=suite)
    assert ended.returncode == 1, ended.stdout
    found = {task["id"]: task["outcome"] for task in json.loads(report.read_text())["tasks"]}
    assert found == {"1.3": "failed", "1.4": "not run"}


@pytest.mark.parametrize("path", [".", "/dev/null/report.json"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    pytest_run: Run, path: str
) -> None:
    ended = pytest_run("--report", f"json={path}", "-k", "1.1")
    assert ended.returncode == 4, ended.stdout
    assert f"--report json={path}: " in ended.stderr
    assert "cannot be written: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_nccl_without_gpus_is_refused_before_anything_runs(pytest_run: Run) -> None:
    ended = pytest_run("--backend", "nccl", "-k", "1.1")
    assert (ended.returncode, "torch sees no GPU here" in ended.stderr) == (4, True)


# --- settings, and options from the environment --------------------------------------------------


def one_line(text: str) -> str:
    """Return the text of a usage error, which must be a single line."""
    (line,) = [line for line in text.splitlines() if line]
    return line


PLANTED = "open({mark!r}, 'w').close()\n"
OF_GRADING = ["--co", "-k 1.1", "-k1.1", "--lf", "--impl solution", "-m task", "-p evil", "a::b"]


@pytest.mark.parametrize("options", OF_GRADING)
def test_options_from_the_environment_pick_no_tests_and_no_submission(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    with pytest.raises(pytest.UsageError, match="options for the display only"):
        suites.check_environment()


def test_a_suite_is_not_graded_as_the_environment_says(pytest_run: Run) -> None:
    ended = pytest_run(PYTEST_ADDOPTS="--collect-only")
    assert ended.returncode == 4, ended.stdout
    assert one_line(ended.stderr).startswith("ERROR: PYTEST_ADDOPTS=--collect-only: with a")


@pytest.mark.parametrize(
    "options",
    [
        ["--rootdir={elsewhere}"],
        ["-c", "{elsewhere}/other.ini"],
        ["-o", "addopts="],
    ],
    ids=" ".join,
)
def test_another_configuration_is_refused_in_one_line(
    fresh_pytest: FreshPytest, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "other.ini").write_text("[pytest]\npythonpath=tests\n")
    asked = [option.format(elsewhere=tmp_path) for option in options]
    ended = fresh_pytest("-q", *asked, SUITE)
    assert ended.returncode == 4, ended.stdout
    assert "pyproject.toml" in one_line(ended.stderr)


def planted(folder: Path) -> Path:
    """Write a hand-in with pytest configuration and plugins in all its folders."""
    shutil.copytree(ROOT / "solutions" / PHASE, folder / PHASE)
    for place in (folder, folder / PHASE):
        (place / "pytest.ini").write_text("[pytest]\naddopts = --collect-only -p conftest\n")
        (place / "conftest.py").write_text(PLANTED.format(mark=str(folder / "it-ran")))
    return folder


def test_what_a_hand_in_plants_for_pytest_is_ignored(pytest_run: Run, tmp_path: Path) -> None:
    folder = planted(tmp_path)
    for file in (folder / PHASE).glob("*.py"):
        file.write_text(file.read_text().replace(f"solutions.{PHASE}", PHASE))
    ended = pytest_run("-k", "1.1", "--impl", folder, f"--confcutdir={folder}")
    points = COURSE.task("1.1").points
    is_full = f"{points}/{points}" in ended.stdout
    assert (ended.returncode, is_full) == (0, True), ended.stdout + ended.stderr
    assert pytest_run(f"--impl={folder}", "-k", "1.1").returncode == 0
    assert not (folder / "it-ran").exists()
