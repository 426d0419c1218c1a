"""``distlab check 1.7 --lend``: with a wrong ``exchange``, on a copy of the course."""

import shutil
from pathlib import Path

import pytest
from commands import distlab
from fresh_pytest import FreshPytest
from own_phases import copy_first_phases

from distlab import course
from distlab.learner import folder, grading, state, status

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
COURSE = course.load(ROOT)
PHASE = "phase1_data_parallel"
SUITE = """
import torch
import torch.distributed as dist

from distlab.grade import check, task

@task("1.4")
def test_a_pair_swaps(grade):
    check(grade.run(swap, 2).results == [1.0, 0.0], "The ranks do not swap.")

def swap(lesson):
    mine, other = torch.full((1,), float(dist.get_rank())), torch.empty(1)
    lesson.exchange(mine, 1 - dist.get_rank(), other, 1 - dist.get_rank())
    return float(other)

@task("1.7")
def test_a_pair_adds_up(grade):
    check(grade.run(add, 2).results == [1.0, 1.0], "The ranks do not add up.")

def add(lesson):
    x = torch.full((1,), float(dist.get_rank()))
    lesson.all_reduce_recursive_doubling(x)
    return float(x)
"""
TODO = 'raise NotImplementedError("Task 1.4: exchange, see guidelines.md#14-exchange")'
OWN = "def exchange(outgoing, dst, incoming, src, group=None):\n    incoming.zero_()\n\n\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> folder.CourseFolder:
    """A copy in which 1.7 is right, and 1.4 wrong."""
    copy_first_phases(ROOT, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in (PHASE, "solutions"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_phase1.py").write_text(SUITE)
    solved = (ROOT / "solutions" / PHASE / "collectives.py").read_text()
    before, head, behind = solved.partition("def broadcast(")
    text = f"{before}{OWN}{head}{behind}"
    (tmp_path / PHASE / "template_collectives.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return folder.find()


def test_a_check_says_what_it_lends_and_remembers_what_passed(
    here: folder.CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distlab("check", "1.7") == 1
    assert "The ranks do not add up" in capsys.readouterr().out
    assert distlab("check", "1.7", "--lend") == 0
    printed = capsys.readouterr().out
    points = COURSE.task("1.7").points
    assert f"1.7 all_reduce_recursive_doubling: passed ({points}/{points} points, " in printed
    assert "graded with the course's 1.4)" in printed
    assert state.load(here).outcome(here.task("1.7")) == "passed"


def test_what_passed_with_a_loan_stays_when_only_the_loan_is_missing(
    here: folder.CourseFolder, fresh_pytest: FreshPytest, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here.root / PHASE / "template_collectives.py"
    file.write_text(file.read_text().replace("incoming.zero_()", TODO))
    assert distlab("check", "1.7", "--lend") == 0
    assert distlab("check", "1.7") == 1
    assert "1.7 all_reduce_recursive_doubling: needs 1.4 exchange" in capsys.readouterr().out
    assert state.load(here).outcome(here.task("1.7")) == "passed"
    fresh_pytest("tests/test_phase1.py", "-q", "-k", "1.7", folder=here.root)
    assert state.load(here).outcome(here.task("1.7")) == "passed"


def test_watch_lends_as_check_does(
    here: folder.CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distlab("watch", "1.7", "--lend") == 0
    assert "graded with the course's 1.4)" in capsys.readouterr().out


def test_a_task_that_builds_on_nothing_is_judged_as_ever(
    here: folder.CourseFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distlab("check", "1.4", "--lend") == 1
    printed = capsys.readouterr().out
    assert "The ranks do not swap" in printed
    assert "graded with" not in printed


def test_a_whole_grading_lends_too(
    here: folder.CourseFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab("grade", "--lend") == 3  # this suite holds two tasks only
    row = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("1.7 "))
    assert "passed" in row
    assert row.endswith("graded with the course's 1.4")


@pytest.mark.parametrize("command", ["check 1.7", "grade"])
def test_a_copy_without_solutions_says_so_in_a_line(
    here: folder.CourseFolder, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shutil.rmtree(here.root / "solutions")
    assert distlab(*command.split(), "--lend") == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "--lend takes functions from solutions/, which this copy" in printed.err


def test_what_was_lent_is_not_to_be_fixed_first(here: folder.CourseFolder) -> None:
    task = here.task("1.7")
    state.remember(here, {"1.4": state.Record("failed")})
    grade = grading.TaskGrade("1.7", "failed", 0, 12, 1.0, lent=("1.4",))
    failed = grading.Grading(1, {"1.7": grade})
    assert list(status.fix_first(here, task, failed, state.load(here))) == []
