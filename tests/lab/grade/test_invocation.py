"""How pytest is called and configured: nothing there earns marks, or runs what was handed in."""

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fresh_pytest import FreshPytest

from distlab import course
from distlab.grade import invocation
from distlab.learner import grading

ROOT = Path(__file__).parents[3]
COURSE = course.load(ROOT)
SUITE = "tests/test_phase1.py"
PHASE = "phase1_data_parallel"
PLANTED = "open({mark!r}, 'w').close()\n"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pytest_run(fresh_pytest: FreshPytest) -> Run:
    return partial(fresh_pytest, "-q", "--backend=sim")


def one_line(text: str) -> str:
    """Return what a usage error says."""
    (line,) = [line for line in text.splitlines() if line]
    return line


def test_a_list_of_tests_is_not_a_grading(pytest_run: Run) -> None:
    ended = pytest_run(SUITE, "--impl=solution", "--collect-only", "-k", "1.1")
    assert ended.returncode == 5, ended.stdout
    assert "nothing was graded: --collect-only lists tests and runs none" in ended.stdout
    assert "points" not in ended.stdout


OF_GRADING = ["--co", "-k 1.1", "-k1.1", "--lf", "--impl solution", "-m task", "-p evil", "a::b"]


@pytest.mark.parametrize("options", OF_GRADING)
def test_options_from_the_environment_pick_no_tests_and_no_submission(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    with pytest.raises(pytest.UsageError, match="options for the display only"):
        invocation.check_environment()


def test_options_of_the_display_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-v --color=no -rA -x --tb=short --durations=3")
    invocation.check_environment()


def test_a_suite_is_not_graded_as_the_environment_says(pytest_run: Run) -> None:
    ended = pytest_run(SUITE, PYTEST_ADDOPTS="--collect-only")
    assert ended.returncode == 4, ended.stdout
    assert one_line(ended.stderr).startswith("ERROR: PYTEST_ADDOPTS=--collect-only: with a")


def test_the_commands_hand_no_options_of_pytests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setenv("PYTEST_PLUGINS", "evil")
    assert {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}.isdisjoint(grading.environment())


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
    """A hand-in with configuration and plugins of pytest in all of its folders."""
    shutil.copytree(ROOT / "solutions" / PHASE, folder / PHASE)
    for place in (folder, folder / PHASE):
        (place / "pytest.ini").write_text("[pytest]\naddopts = --collect-only -p conftest\n")
        (place / "conftest.py").write_text(PLANTED.format(mark=str(folder / "it-ran")))
    return folder


def test_what_a_hand_in_plants_for_pytest_is_ignored(pytest_run: Run, tmp_path: Path) -> None:
    folder = planted(tmp_path)
    for file in (folder / PHASE).glob("*.py"):
        file.write_text(file.read_text().replace(f"solutions.{PHASE}", PHASE))
    ended = pytest_run(SUITE, "-k", "1.1", "--impl", folder, f"--confcutdir={folder}")
    points = COURSE.task("1.1").points
    is_full = f"{points}/{points}" in ended.stdout
    assert (ended.returncode, is_full) == (0, True), ended.stdout + ended.stderr
    assert pytest_run(f"--impl={folder}", SUITE, "-k", "1.1").returncode == 0
    assert not (folder / "it-ran").exists()
