"""What pytest is asked for, what it then says, and with which code it ends."""

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fresh_pytest import FreshPytest

from distlab import course
from distlab.grade.reports import gradescope
from distlab.grade.results import GradeResult

ROOT = Path(__file__).parents[3]
COURSE = course.load(ROOT)
SUITE = "tests/test_phase1.py"
MY_SUITE = """
from distlab.grade import check, task

def nothing(lesson):
    return 1

@task("1.4")
def test_that_breaks(grade):
    {body}

@task("1.5")
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
    report.write_text(gradescope.text(GradeResult("here", [], 1.0)))  # of an earlier run
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
    assert "not all tests of the task were run: no points" in ended.stdout
    assert "broadcast" not in ended.stdout, "only what was asked for is in the table"
    (task,) = ET.parse(junit).getroot()
    assert (task.get("name"), task.get("errors")) == ("1.4 exchange", "1"), "CI must not be green"


def test_the_tests_that_failed_last_are_not_the_whole_task(pytest_run: Run, tmp_path: Path) -> None:
    body = "grade.call(nothing)\n    check(not __import__('os').environ.get('BREAK'), 'wrong')"
    my_suite(tmp_path, body)
    second = "\n@task('1.4')\ndef test_more(grade):\n    grade.call(nothing)\n"
    (tmp_path / "test_mine.py").write_text((tmp_path / "test_mine.py").read_text() + second)
    cache = ("-o", f"cache_dir={tmp_path / 'cache'}", "-k", "1.4")
    assert pytest_run(*cache, suite=tmp_path, BREAK="yes").returncode == 1
    ended = pytest_run(*cache, "--lf", suite=tmp_path)
    assert f"0/{COURSE.task('1.4').points}" in ended.stdout, ended.stdout
    assert ended.returncode == 1


def test_tasks_are_picked_by_their_ids(pytest_run: Run) -> None:
    ended = pytest_run("-k", "1.1 or 1.4", "--collect-only")
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
    assert (found["1.4"], found["1.5"]) == ("grader error", "passed")


def test_tests_that_pytest_left_out_are_not_run(pytest_run: Run, tmp_path: Path) -> None:
    suite, report = my_suite(tmp_path, "check(False, 'wrong')"), tmp_path / "report.json"
    ended = pytest_run("-x", "-k", "1.4 or 1.5", "--report", f"json={report}", suite=suite)
    assert ended.returncode == 1, ended.stdout
    found = {task["id"]: task["outcome"] for task in json.loads(report.read_text())["tasks"]}
    assert found == {"1.4": "failed", "1.5": "not run"}


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


def test_tests_of_one_task_are_not_spread_over_workers(pytest_run: Run, tmp_path: Path) -> None:
    ended = pytest_run("-n", "2", "-k", "1.1")
    assert (ended.returncode, "leave -n out" in ended.stderr) == (4, True)
    ended = pytest_run("-n", "2", "-k", "1.4", suite=my_suite(tmp_path, "grade.call(nothing)"))
    assert ended.returncode not in (0, 1), "a worker judges a part: that must not pass for all"
