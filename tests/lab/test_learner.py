"""The learner's commands on a copy of the course; nothing here starts the grader."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from typing import get_args

import pytest
from commands import (
    COURSE,
    FILE,
    RIGHT,
    ROOT,
    WRONG,
    copy_course,
    distlab,
    grade_as,
    reporting,
    result_of,
    write_exchange,
)

from distlab.cli import learn
from distlab.grade import plugin, report_paths, reports
from distlab.grade.outcomes import Outcome
from distlab.grade.results import GradeResult, TaskResult
from distlab.learner import folder as folders
from distlab.learner import grading, hints, source, state, status, templates, watch
from distlab.learner.folder import CourseFolder
from distlab.learner.watch import Screen, wrapped

Printed = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Patch) -> CourseFolder:
    monkeypatch.chdir(tmp_path)
    return copy_course(tmp_path)


@pytest.fixture
def two_phases(tmp_path: Path, monkeypatch: Patch) -> CourseFolder:
    monkeypatch.chdir(tmp_path)
    return copy_course(tmp_path, num_phases=2)


# --- status --------------------------------------------------------------------------------------


def test_without_a_command_it_shows_progress_and_the_next_task(
    here: CourseFolder, capsys: Printed, monkeypatch: Patch
) -> None:
    grade_as(here, t1_1="passed", t1_2="failed")
    monkeypatch.chdir(here.root / "phase1_data_parallel")
    assert distlab() == 0
    printed = capsys.readouterr().out
    points, phase = here.task("1.1").points, here.course.phases[0]
    assert f"1/{len(phase.tasks)} tasks  {points}/{phase.points} points" in printed
    assert "Next: 1.2 Load a share of every batch (" in printed
    assert "distlab check 1.2" in printed


def test_status_shows_outcomes_and_later_edits(here: CourseFolder, capsys: Printed) -> None:
    grade_as(here, t1_3="passed", t1_4="hang")
    write_exchange(here, RIGHT)
    assert distlab("status") == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["✔", "1.3", "exchange", "passed, edited since"] in lines
    assert ["✘", "1.4", "broadcast", "hang"] in lines
    assert ["·", "1.6", "all_reduce_naive", "not written yet"] in lines


def test_status_tells_unwritten_tasks_from_ungraded_ones(
    here: CourseFolder, capsys: Printed
) -> None:
    write_exchange(here, RIGHT)
    grade_as(here, t1_4="todo")
    assert distlab("status") == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["·", "1.3", "exchange", "not graded yet"] in lines
    for id, label in (("1.1", "shard_indices"), ("1.4", "broadcast")):
        assert ["·", id, label, "not written yet"] in lines


BEFORE = """\
from typing import Any, cast

import torch

SCALE = 3
torch.manual_seed(0)


def exchange(x):
    return _scaled(x)


def broadcast(x):
    return exchange(x)


def _scaled(x):
    # multiplies
    return x * SCALE + torch.ones(1)


def _shown(x):
    return cast(Any, x)


if __name__ == "__main__":
    print(_shown(3))
"""
CLASSES_BEFORE = """\
class LossScaler(Base):
    growth = 2

    def __init__(self):
        self.factor = 1

    def scale(self, loss):
        return self._times(loss)

    def unscale(self, optimizer):
        return True

    def _times(self, loss):
        return loss * self.factor


class Other:
    def unscale(self, optimizer):
        return False


def mixed_precision_step(scaler):
    return scaler.scale(1)
"""


@pytest.mark.parametrize(
    ("id", "old", "new", "is_edit"),
    [
        ("1.3", "_scaled(x)\n\n", "_scaled(x)  # on all\n\n", True),
        ("1.3", "SCALE +", "SCALE -", True),
        ("1.3", "SCALE = 3", "SCALE = 4", True),
        ("1.3", "import torch", "import torch.nn as torch", True),
        ("1.3", "seed(0)", "seed(1)", True),
        ("1.4", "seed(0)", "seed(1)", True),
        ("1.4", "import torch\n", "import torch\nfrom math import *\n", True),
        ("1.3", "# multiplies", "# scales", False),
        ("1.3", "exchange(x)\n", "exchange(2 * x)\n", False),
        ("1.3", "cast(Any, x)", "x", False),
        ("1.3", "print(_shown(3))", "pass", False),
        ("1.3", "import Any, cast", "import Any", False),
        ("1.3", "import torch\n", "import math\nimport torch\n", False),
        ("1.4", "exchange(x)\n", "exchange(2 * x)\n", True),
        ("1.4", "_scaled(x)\n\n", "_scaled(2 * x)\n\n", False),
        ("1.4", "SCALE +", "SCALE -", False),
        ("2.3", "growth = 2", "growth = 3", True),
        ("2.3", "(Base)", "", True),
        ("2.3", "* self.factor", "/ self.factor", True),
        ("2.3", "True", "None", True),
        ("2.3", "False", "None", False),
        ("2.3", "scale(1)", "scale(2)", False),
        ("2.4", "scale(1)", "scale(2)", True),
        ("2.4", "growth = 2", "growth = 3", False),
    ],
)
def test_a_task_counts_as_edited_if_its_code_or_code_that_it_uses_has_changed(
    two_phases: CourseFolder, id: str, old: str, new: str, is_edit: bool
) -> None:
    before = BEFORE if id.startswith("1.") else CLASSES_BEFORE
    assert before.count(old) == 1
    task = two_phases.task(id)
    path = two_phases.root / task.template
    path.write_text(before)
    state.remember(two_phases, {id: state.Record("failed", source.digest(two_phases, task))})
    path.write_text(before.replace(old, new))
    assert state.load(two_phases).is_edited(two_phases, task) == is_edit


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"edition": 2, "tasks": 3, "hints": []}'),
        '{"tasks": {"1.3": {"outcome": "passed"}}, "hints": {"1.3": 1}}',  # the first edition's 1.3
        '{"edition": 2, "tasks": {"1.3": {"outcome": "splendid"}, "1.4": 7}, "hints": {}}',
        '{"edition": 2, "tasks": {}, "hints": {"1.3": 9, "1.4": true}}',
    ],
)
def test_a_malformed_state_is_ignored(here: CourseFolder, text: str) -> None:
    here.private.mkdir()
    (here.private / state.FILE).write_text(text)
    progress = state.load(here)
    assert (progress.records, progress.hints) == ({}, {})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("check 1.55", "there is no task '1.55'. Did you mean '1.5'?"),
        ("hint x", "there is no task 'x'. There are: 1.1, 1.2, 1.3, 1.4, 1.5, 1.6"),
        ("hint broadcst", "there is no task 'broadcst'. Did you mean 'broadcast'?"),
        ("check 2.1", "phase 2 is not in this course's folder yet; there are 1.1 to "),
        ("diff", "no task has passed yet: name one, with --spoil"),
        ("diff 1.3", "1.3 has not passed yet: distlab check 1.3, or --spoil shows it anyway"),
        ("reset 1.3", "cannot ask for confirmation here: use distlab reset 1.3 --yes"),
        ("hint 1.3 --level 4", "--level 4: a task has hints 1 to 3"),
        ("grade --phase 9", "there is no phase '9'. There are: 1"),
        ("grade --impl nowhere", "--impl nowhere: no such folder; use template, solution or a "),
        ("grade --impl tests", "--impl tests: contains none of phase1_data_parallel"),
        ("grade --report xml=a", "with one of json, junit, gradescope, markdown"),
        ("grade --backend x", "'auto', 'sim', 'gloo', 'nccl'"),
        ("trace 1.13", "there is no picture of 1.13; distlab trace draws 1.5, 1.3, 1.4, 1.6, 1.7"),
        ("trace 1.3 --ranks 9", "--ranks 9: the simulated laptop has 2 to 8"),
        ("check 1.3 --world-timeout nan", "nan: must be a number of seconds above 0"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(
    here: CourseFolder, arguments: str, line: str, capfd: Printed
) -> None:
    assert distlab(*arguments.split()) == 2
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert line in printed.err


def test_commands_work_if_progress_cannot_be_saved_and_say_why(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed
) -> None:
    here.private.write_text("not a folder")
    problem = f"your progress cannot be kept in {here.private}: File exists\n"
    passed = reporting(0, result_of("1.3", "passed"))
    monkeypatch.setattr(grading, "captured_in", lambda _: passed)
    for arguments, begin, error in (
        ("status", "Phase 1", ""),
        ("hint 1.3", "1.3 Exchange without", problem),
        ("check 1.3", "✔ 1.3 exchange: passed", problem),
    ):
        assert distlab(*arguments.split()) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(begin)
        assert printed.err == error
    assert here.private.read_text() == "not a folder"


# --- hints and diff ------------------------------------------------------------------------------


def test_each_call_shows_the_next_hint_and_the_last_says_so(
    here: CourseFolder, capsys: Printed
) -> None:
    grade_as(here, t1_1="passed", t1_2="passed", t1_5="passed", t1_3="passed")
    titles = []
    for _ in range(4):
        assert distlab("hint") == 0
        printed = capsys.readouterr().out
        titles.append(printed.splitlines()[1])
    assert printed.startswith("1.4 "), "the next task by default"
    assert titles == ["Hint 1: a question", "Hint 2: the idea"] + 2 * ["Hint 3: names"]
    assert "That was the last hint. Read on in phase1_data_parallel/guidelines.md#14-b" in printed
    assert distlab("hint", "broadcast", "--level", "1") == 0
    assert "how many ranks have the data, and" in capsys.readouterr().out


def test_every_task_has_three_hints() -> None:
    whole = folders.find(ROOT)
    assert all(len(hints.hints(whole, task)) == 3 for task in whole.course.tasks)


def test_diff_compares_only_the_functions_of_a_task(here: CourseFolder, capsys: Printed) -> None:
    write_exchange(here, RIGHT)
    grade_as(here, t1_4="passed", t1_3="passed", t1_6="failed")
    assert distlab("diff") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- yours: exchange\n+++ solution: exchange\n")
    assert "-    for work in dist.batch_isend_irecv(both):" not in printed, "both have this line"
    assert "def broadcast" not in printed


@pytest.mark.parametrize(
    ("id", "shown", "not_shown"),
    [
        ("1.2", "_equal_share", "shard_indices"),
        ("1.8", "fit_alpha_beta", "_exchange_in_ring"),
        ("1.9", "_broadcast_all", "broadcast"),
        ("1.13", "Trainer._finish_epoch", "Trainer.__init__"),
    ],
)
def test_diff_shows_helpers_that_contain_the_answer_but_no_docstrings(
    here: CourseFolder, capsys: Printed, id: str, shown: str, not_shown: str
) -> None:
    assert distlab("diff", id, "--spoil") == 0
    printed = capsys.readouterr().out
    assert f"+++ solution: {shown}\n" in printed
    assert f"solution: {not_shown}\n" not in printed
    assert '"""' not in printed


# --- reset ---------------------------------------------------------------------------------------


def git(here: CourseFolder, *arguments: str) -> None:
    settings = ["-c", "user.name=learner", "-c", "user.email=learner@example.org"]
    subprocess.run(["git", *settings, *arguments], cwd=here.root, check=True, capture_output=True)


@pytest.fixture(params=["git", "copy"])
def kept(request: pytest.FixtureRequest, here: CourseFolder) -> CourseFolder:
    """A copy of the course whose templates are kept in git, or only in .distlab/."""
    if request.param == "copy":
        templates.keep(here)
        return here
    git(here, "init", "-q")
    git(here, "add", str(FILE))
    git(here, "commit", "-qm", "the course as it is handed out")
    write_exchange(here, WRONG)
    git(here, "commit", "-qam", "learners commit their own code too")
    return here


def backup(here: CourseFolder) -> bytes:
    """Return the content of the only file that a reset of Task 1.3 has backed up."""
    (old,) = (here.private / "reset" / "1.3").iterdir()
    return old.read_bytes()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_reset_restores_one_function_and_keeps_all_other_bytes(
    kept: CourseFolder, end: bytes, capsys: Printed
) -> None:
    unusual = b"\x0c# form feed, line separator \xe2\x80\xa8\n"
    after = (unusual + (ROOT / FILE).read_bytes()).replace(b"\n", end)
    write_exchange(kept, WRONG)
    before = (unusual + (kept.root / FILE).read_bytes()).replace(b"\n", end)
    (kept.root / FILE).write_bytes(before)
    (kept.root / FILE).chmod(0o640)
    grade_as(kept, t1_3="failed")
    assert distlab("reset", "1.3", "--yes") == 0
    assert (kept.root / FILE).read_bytes() == after
    assert (kept.root / FILE).stat().st_mode & 0o777 == 0o640
    assert backup(kept) == before
    line = "exchange: back to the start. Your old file: .distlab/reset/1.3/"
    assert capsys.readouterr().out.startswith(line)
    assert state.load(kept).outcome(kept.task("1.3")) == ""


SECOND = "\n\ndef exchange(outgoing, dst, incoming, src, group=None):\n    incoming.zero_()\n"


@pytest.mark.parametrize(
    "old",
    [
        b"def helper(:\n",
        b"# a file without the function\nx = 1\n",
        b"def exchange(x):\n    pass\n\n\nreturn\n",
        b"# \xff\n",
        b"",
    ],
    ids=["does not parse", "no function", "return outside", "not UTF-8", "empty"],
)
def test_reset_backs_up_a_broken_file_and_replaces_all_of_it(
    kept: CourseFolder, old: bytes, capsys: Printed
) -> None:
    (kept.root / FILE).write_bytes(old)
    assert distlab("reset", "1.3", "--yes") == 0
    assert (kept.root / FILE).read_bytes() == (ROOT / FILE).read_bytes()
    assert backup(kept) == old
    assert capsys.readouterr().out.startswith(f"{FILE}: back to the start. Your old file: ")


def test_reset_of_a_whole_file_forgets_all_its_tasks(kept: CourseFolder) -> None:
    progress = state.load(kept)
    for task in ("1.5", "1.4"):
        progress.records[task] = state.Record(Outcome.PASSED)
    progress.save()
    (kept.root / FILE).write_text("def broken(:")
    assert distlab("reset", "1.3", "--yes") == 0
    assert list(state.load(kept).records) == ["1.5"]


def no_template(here: CourseFolder, _: Patch) -> None:
    shutil.rmtree(here.private)


def cannot_back_up(here: CourseFolder, _: Patch) -> None:
    (here.private / "reset").write_text("not a folder")


def cannot_replace_the_file(_: CourseFolder, patch: Patch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    patch.setattr(Path, "replace", fail)


@pytest.mark.parametrize(
    ("break_it", "code", "message"),
    [
        (no_template, 2, "neither git nor .distlab/templates has"),
        (cannot_back_up, 1, "nothing was changed: "),
        (cannot_replace_the_file, 1, "disk full"),
    ],
)
def test_a_reset_that_fails_leaves_the_file_as_it_was(
    here: CourseFolder,
    monkeypatch: Patch,
    capsys: Printed,
    break_it: Callable[[CourseFolder, Patch], None],
    code: int,
    message: str,
) -> None:
    templates.keep(here)
    write_exchange(here, WRONG)
    before = (here.root / FILE).read_bytes()
    break_it(here, monkeypatch)
    assert distlab("reset", "1.3", "--yes") == code
    assert message in capsys.readouterr().err
    assert (here.root / FILE).read_bytes() == before
    assert list((here.root / FILE).parent.glob(".*")) == []


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("", f"Replace all of {FILE}, where exchange cannot be replaced alone, with the template?"),
        (SECOND, f"Replace exchange in {FILE} with the template?"),
    ],
)
def test_reset_asks_first(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed, text: str, question: str
) -> None:
    templates.keep(here)
    (here.root / FILE).write_text(text)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions: list[str] = []
    monkeypatch.setattr("typer.confirm", questions.append)
    assert distlab("reset", "1.3") == 1
    assert questions == [question]
    assert capsys.readouterr().out == "Nothing was changed.\n"
    assert (here.root / FILE).read_text() == text


# --- grading results -----------------------------------------------------------------------------


def test_commands_accept_the_options_of_the_grader() -> None:
    assert reports.FORMATS.keys() == report_paths.HEADS.keys()
    assert get_args(learn.Backend) == plugin.BACKENDS


PASSED = result_of("1.3", "passed")


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (reporting(0, PASSED), 0),
        (reporting(1, PASSED, result_of("1.4", "todo")), 1),
        (reporting(0, result_of("1.3", "passed", expected=2)), 1),
        (reporting(4), 2),
        (reporting(0), 3),
        (reporting(1, result_of("1.3", "grader error")), 3),
        (reporting(2, PASSED), 3),
        (reporting(-9, PASSED), 3),
        (reporting(5), 4),
    ],
)
def test_only_a_complete_report_with_full_marks_is_a_success(
    here: CourseFolder, run: grading.RunPytest, code: int
) -> None:
    assert grading.grade(here, [], run).code == code


BROADCAST = ("1.4", "broadcast")


def test_a_pass_stays_if_only_an_earlier_task_is_missing(here: CourseFolder) -> None:
    """This happens if 1.6 passed with ``check --lend``, which uses earlier solutions."""
    missing = reporting(1, result_of("1.6", "todo", missing=BROADCAST))
    grade_as(here, t1_6="passed")
    progress = grading.remember(here, grading.grade(here, [], missing))
    assert progress.outcome(here.task("1.6")) == "passed"
    text = (here.root / FILE).read_text()
    (here.root / FILE).write_text(text.replace('"Task 1.6: ', '"Task 1.6: my '))
    progress = grading.remember(here, grading.grade(here, [], missing))
    assert progress.outcome(here.task("1.6")) == "todo", "the code that passed has changed"


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (result_of("1.6", "failed"), "failed"),
        (result_of("1.6", "todo", missing=("1.6", "all_reduce_naive")), "todo"),
        (TaskResult(COURSE.task("1.6"), "", "", expected=1), "passed"),
    ],
    ids=["failed", "not written", "not run"],
)
def test_a_pass_lasts_until_the_next_verdict_on_the_task(
    here: CourseFolder, result: TaskResult, outcome: str
) -> None:
    grade_as(here, t1_6="passed")
    progress = grading.remember(here, grading.grade(here, [], reporting(1, result)))
    assert progress.outcome(here.task("1.6")) == outcome


def check(monkeypatch: Patch, capsys: Printed, result: TaskResult, *options: str) -> list[str]:
    """Return the lines that ``distlab check`` prints for a task with this result."""
    has_passed = result.outcome is Outcome.PASSED
    run = reporting(0 if has_passed else 1, result)
    monkeypatch.setattr(grading, "captured_in", lambda _: run)
    assert distlab("check", *options, result.task.id) == (0 if has_passed else 1)
    return capsys.readouterr().out.splitlines()


def test_a_failure_shows_the_verdict_advice_and_the_next_commands(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed
) -> None:
    failed = result_of("1.3", "hang", details="\n".join(map(str, range(40))), kind="blocked")
    lines = check(monkeypatch, capsys, failed)
    assert lines[:2] == [
        f"✘ 1.3 exchange: hang (0/{here.task('1.3').points} points, 0.1 s)",
        "Task 1.3: Why. What does this line wait for, and who could end the wait? guidelines.md "
        "1.3",
    ]
    assert lines[2].startswith("  … 15 earlier lines; ")
    assert lines[-1] == "Stuck? distlab hint 1.3   Again: distlab check 1.3"
    assert "  0" in check(monkeypatch, capsys, failed, "-v")


def test_a_missing_earlier_task_comes_first(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed
) -> None:
    waiting = result_of("1.6", "todo", missing=BROADCAST)
    assert check(monkeypatch, capsys, waiting) == [
        "· 1.6 all_reduce_naive: needs 1.4 broadcast, which is still to be written",
        "Write broadcast in phase1_data_parallel/template_collectives.py.",
        "Read  phase1_data_parallel/guidelines.md#14-broadcast-along-a-tree",
        "Run:  distlab check 1.4   or: distlab watch 1.4",
        "Or take 1.4 from the solutions: distlab check --lend 1.6",
    ]
    needs_more = result_of("1.8", "todo", missing=("1.3", "exchange"))
    assert check(monkeypatch, capsys, needs_more)[-1] == (
        "Or take 1.3, 1.4 and 1.6 from the solutions: distlab check --lend 1.8"
    )
    assert check(monkeypatch, capsys, waiting, "--lend")[-1] == (
        "Run:  distlab check --lend 1.4   or: distlab watch --lend 1.4"
    )
    shutil.rmtree(here.root / "solutions")
    assert not any("--lend" in line for line in check(monkeypatch, capsys, waiting))


def test_suggested_commands_repeat_the_option_lend(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed
) -> None:
    grade_as(here, t1_3="failed")
    lines = check(monkeypatch, capsys, result_of("1.7", "failed"), "--lend")
    assert lines[-1] == "Stuck? distlab hint 1.7   Again: distlab check --lend 1.7"
    assert any(line.endswith("Fix 1.3 first: distlab check --lend 1.3") for line in lines)
    lines = check(monkeypatch, capsys, result_of("1.7", "failed", lent=["1.3"]), "--lend")
    assert not any("Fix 1.3 first" in line for line in lines)
    passed = result_of("1.7", "passed", lent=["1.3"])
    lines = check(monkeypatch, capsys, passed, "--lend")
    assert lines[0].endswith(" 0.1 s, graded with the course's 1.3)")
    assert lines[-1] == "Run:  distlab check --lend 1.8   or: distlab watch --lend"


@pytest.mark.parametrize(
    ("id", "kind", "world_size", "line"),
    [
        ("1.3", "deadlock", 2, "See who waits for whom: distlab trace 1.3 --ranks 2"),
        ("1.7", "all wait", 8, "See who waits for whom: distlab trace 1.7"),
        ("1.7", "wrong", 3, "See who sends what: distlab trace 1.7 --ranks 3"),
        ("1.7", "wrong", 1, ""),
        ("1.7", "deadlock", 16, ""),
        ("1.7", "endless loop", 3, ""),
        ("1.13", "deadlock", 4, ""),
    ],
)
def test_a_verdict_suggests_a_picture_with_the_same_number_of_ranks(
    here: CourseFolder, id: str, kind: str, world_size: int, line: str
) -> None:
    result = result_of(id, "hang", kind=kind, world_size=world_size)
    failed = grading.Grading(1, GradeResult("here", [result], 1.0))
    lines = list(status.explanation(here, here.task(id), failed))
    assert lines[len(failed.advice) :] == [line] * bool(line)


@pytest.mark.parametrize("command", ["check 1.3", "grade", "watch 1.3"])
def test_options_reach_the_grader(
    two_phases: CourseFolder, monkeypatch: Patch, command: str
) -> None:
    asked: list[str] = []

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.extend(arguments)
        return 5, ""

    for name in ("captured_in", "shown_in"):
        monkeypatch.setattr(grading, name, lambda _: run)
    options = ("--world-timeout", "7.5", "--semantics", "nccl")
    assert distlab(*command.split(), *options) == grading.NOTHING_RAN
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert asked[asked.index(name) + 1] == value


def test_several_tasks_are_checked_one_by_one(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed
) -> None:
    verdicts = {"1.3": (1, "failed"), "1.4": (0, "passed"), "1.6": (3, "grader error")}

    def run(arguments: list[str]) -> tuple[int, str]:
        id = arguments[arguments.index("-k") + 1]
        code, outcome = verdicts[id]
        return reporting(code, result_of(id, outcome))(arguments)

    monkeypatch.setattr(learn, "_grader", lambda *_: nullcontext(run))
    assert distlab("check", "1.4", "1.3", "broadcast", "--lend") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines if line.startswith(("✔", "✘"))] == [
        "✔ 1.4 broadcast: passed",
        "✘ 1.3 exchange: failed",
    ]
    assert lines[-1].startswith("Run:  distlab check --lend ")
    assert distlab("check", "1.3", "1.6", "1.4") == 3


def test_a_failure_of_the_grader_shows_the_output_of_pytest(
    here: CourseFolder, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.setattr(grading, "captured_in", lambda _: reporting(3, output="INTERNALERROR> no"))
    assert distlab("check", "1.3") == 3
    printed = capsys.readouterr().out
    assert printed.startswith("The grader failed; this is not your fault")
    assert "INTERNALERROR> no" in printed


# --- the next task -------------------------------------------------------------------------------


def next_id(here: CourseFolder, after: str = "") -> str:
    task = state.load(here).next_task(here, here.task(after) if after else None)
    return task.id if task else ""


def test_the_next_task_is_in_the_latest_phase(two_phases: CourseFolder) -> None:
    assert next_id(two_phases) == "1.1"
    grade_as(two_phases, t2_1="passed", t1_3="failed")
    assert next_id(two_phases) == "2.2"
    grade_as(two_phases, t1_1="passed")
    assert next_id(two_phases) == "1.2"
    grade_as(two_phases, t2_9="passed")
    assert next_id(two_phases) == "2.10", "a learner who started in the middle continues there"
    grade_as(two_phases, t1_1="passed")
    grade_as(two_phases, t1_1="passed", t1_2="todo", t2_1="passed", t2_2="todo")
    assert next_id(two_phases) == "1.2", (
        "grading everything does not show where the learner is working"
    )


def test_a_phase_is_finished_before_the_next_one(two_phases: CourseFolder) -> None:
    first, second = (phase.tasks for phase in two_phases.course.phases[:2])
    passed = state.Record("passed")
    state.remember(two_phases, {task.id: passed for task in second if task.id != "2.2"})
    assert next_id(two_phases, second[-1].id) == "2.2"
    state.remember(two_phases, {"2.2": passed})
    assert next_id(two_phases) == next_id(two_phases, "2.2") == "1.1"
    state.remember(two_phases, {task.id: passed for task in first})
    assert next_id(two_phases) == next_id(two_phases, "1.1") == ""


# --- watch ---------------------------------------------------------------------------------------


def typed(*keys: str) -> "Queue[str]":
    """Return a queue of keys, each of which arrives once the previous one has been handled."""

    class Keys(Queue[str]):
        def get(self, block: bool = True, timeout: float | None = None) -> str:
            return next(coming) if block else super().get(block=False)

    coming = iter(keys)
    return Keys()


def session(
    here: CourseFolder, run: grading.RunPytest, *keys: str, events: "Queue[str] | None" = None
) -> tuple[watch.Watch, list[str]]:
    """Run a session on Task 1.3; return the session and all lines that it showed."""
    lines: list[str] = []
    screen = Screen(lines.extend, lambda: None, lambda: (200, 100))
    watching = watch.Watch(here, here.task("1.3"), run, screen)
    watching.run(events or typed(*keys, watch.QUIT))
    return watching, lines


FAILED = reporting(1, result_of("1.3", "failed"))
MENU = "c check all  q quit    (grades on every save)"


def test_n_continues_only_when_the_task_has_passed(here: CourseFolder) -> None:
    watching, lines = session(here, FAILED, "n")
    assert watching.task.id == "1.3"
    assert lines[-3:] == ["1.3 has not passed yet; h shows a hint", "", f"h hint  {MENU}"]
    watching, lines = session(here, reporting(0, PASSED), "n")
    assert watching.task.id == "1.4", "next is the task after 1.3, though 1.1 has not passed either"
    assert f"n next  h hint  d diff  {MENU}" in lines


def test_keys_show_hints_differences_and_all_tasks(here: CourseFolder) -> None:
    _, lines = session(here, FAILED, "h", "h", "d", "c", "?")
    titles = [line for line in lines if line.startswith("Hint")]
    assert titles == ["Hint 1: a question", "Hint 2: the idea"]
    assert "1.3 has not passed yet: the solution is shown once it has" in lines
    assert any(f"0/{len(COURSE.phases[0].tasks)} tasks" in line for line in lines)
    _, lines = session(here, reporting(0, PASSED), "d")
    assert "+++ solution: exchange" in lines


def failing_while(
    events: "Queue[str]", *batches: Sequence[str]
) -> tuple[grading.RunPytest, list[str]]:
    """Return a grader, and a list of the tasks that it has been asked to grade.

    Each task fails, and while it is being graded, the next batch of events arrives.
    """
    asked: list[str] = []
    coming = iter(batches)

    def run(arguments: list[str]) -> tuple[int, str]:
        asked.append(arguments[arguments.index("-k") + 1])
        for event in next(coming, [watch.QUIT]):
            events.put(event)
        return reporting(1, result_of(asked[-1], "failed"))(arguments)

    return run, asked


def test_keys_typed_during_grading_wait_for_its_end_and_for_saves(here: CourseFolder) -> None:
    events = typed(watch.QUIT)
    run, asked = failing_while(events, ["h", "n", watch.SAVED, "h", watch.SAVED], [])
    _, lines = session(here, run, events=events)
    assert asked == ["1.3", "1.3"]
    starts = ("grading", "✘", "Hint", "1.3 has not passed")
    verdict = ["grading 1.3 exchange …", "✘ 1.3 exchange"]
    refusal = "1.3 has not passed yet; h shows a hint"
    shown = [line.partition(":")[0] for line in lines if line.startswith(starts)]
    assert shown == [*verdict, *verdict, verdict[1], "Hint 1", verdict[1], refusal]


def test_c_shows_each_verdict_at_once_and_q_quits_in_between(here: CourseFolder) -> None:
    events = typed("c")
    run, asked = failing_while(events, [], [], [], ["q"])
    _, lines = session(here, run, events=events)
    assert asked == ["1.3", "1.1", "1.2", "1.3"]
    assert [line.partition(" (")[0] for line in lines[-3:]] == [
        "grading all tasks …",
        "✘ 1.1 shard_indices: failed",
        "✘ 1.2 build_loader: failed",
    ]


@pytest.mark.parametrize(("width", "height"), [(200, 100), (80, 24), (60, 20)])
def test_a_hint_leaves_the_verdict_on_the_screen(
    here: CourseFolder, width: int, height: int
) -> None:
    details = "\n".join(f"rank {rank} waits" for rank in range(40))
    run = reporting(1, result_of("1.3", "hang", message="Deadlock.", details=details))
    screens: list[list[str]] = []
    screen = Screen(
        lambda lines: screens[-1].extend(lines), lambda: screens.append([]), lambda: (width, height)
    )
    watch.Watch(here, here.task("1.3"), run, screen).run(typed("h", "h", watch.QUIT))
    for level, shown in zip((1, 2), screens[-2:], strict=True):
        assert shown[0].startswith("✘ 1.3 exchange: hang")
        assert any(line.startswith(f"Hint {level}") for line in shown)
        assert shown[-1].endswith("(grades on every save)")
        assert len(shown) < height
        assert max(map(len, shown)) <= width


def test_lines_break_between_words() -> None:
    line = "  rank 0 waits for rank 1 to receive, and rank 1 waits for rank 0 to receive."
    assert wrapped(["short", line, ""], 40) == [
        "short",
        "  rank 0 waits for rank 1 to receive,",
        "    and rank 1 waits for rank 0 to",
        "    receive.",
        "",
    ]
