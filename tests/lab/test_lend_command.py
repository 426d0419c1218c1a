"""``distlab check 1.7 --lend`` on a copy of the course with a wrong ``exchange``."""

import shutil
from pathlib import Path

import pytest
from commands import COURSE, FILE, PHASE, ROOT, copy_course, distlab
from processes import FreshPytest

from distlab.learner import state
from distlab.learner.folder import CourseFolder

pytestmark = pytest.mark.usefixtures("forked")

TODO = 'raise NotImplementedError("Task 1.3: exchange, see guidelines.md#14-exchange")'
OWN = "def exchange(outgoing, dst, incoming, src, group=None):\n    incoming.zero_()\n\n\n"
Printed = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    """A copy of the course in which Task 1.7 is right and Task 1.3 is wrong."""
    copied = copy_course(tmp_path)
    solved = (ROOT / "solutions" / PHASE / "collectives.py").read_text()
    before, head, rest = solved.partition("def broadcast(")
    (tmp_path / FILE).write_text(f"{before}{OWN}{head}{rest}")
    monkeypatch.chdir(tmp_path)
    return copied


def test_a_check_says_what_it_lends_and_remembers_what_passed(
    here: CourseFolder, capsys: Printed
) -> None:
    assert distlab("check", "1.7") == 1
    assert "The ranks do not add up" in capsys.readouterr().out
    assert distlab("watch", "1.7", "--lend") == 0, "without a terminal, one check"
    printed = capsys.readouterr().out
    points = COURSE.task("1.7").points
    assert f"1.7 all_reduce_recursive_doubling: passed ({points}/{points} points, " in printed
    assert "graded with the course's 1.3)" in printed
    assert state.load(here).outcome(here.task("1.7")) == "passed"


def test_what_passed_with_a_loan_stays_when_only_the_loan_is_missing(
    here: CourseFolder, fresh_pytest: FreshPytest, capsys: Printed
) -> None:
    file = here.root / FILE
    file.write_text(file.read_text().replace("incoming.zero_()", TODO))
    assert distlab("check", "1.7", "--lend") == 0
    capsys.readouterr()
    assert distlab("check", "1.7") == 1
    assert "1.7 all_reduce_recursive_doubling: needs 1.3 exchange" in capsys.readouterr().out
    fresh_pytest("tests/test_phase1.py", "-q", "-k", "1.7", folder=here.root)
    assert state.load(here).outcome(here.task("1.7")) == "passed"


def test_a_whole_grading_lends_too(here: CourseFolder, capfd: Printed) -> None:
    # The report is incomplete, because this suite tests only two tasks.
    assert distlab("grade", "--lend") == 3
    rows = [line for line in capfd.readouterr().out.splitlines() if line[:4] in ("1.3 ", "1.7 ")]
    assert "failed" in rows[0]
    assert "graded with" not in rows[0], "it builds on nothing"
    assert "passed" in rows[1]
    assert rows[1].endswith("graded with the course's 1.3")


@pytest.mark.parametrize("command", ["check 1.7", "grade"])
def test_a_copy_without_solutions_says_so_in_a_line(
    here: CourseFolder, capsys: Printed, command: str
) -> None:
    shutil.rmtree(here.root / "solutions")
    assert distlab(*command.split(), "--lend") == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "--lend takes functions from solutions/, which this copy" in printed.err
