"""Right values at too high a cost: verdict, points, and what learners and reports are told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import COURSE, RIGHT, copy_course, distlab, write_exchange

from distlab.grade import reports, table
from distlab.grade.checks import TooDear, Wrong, check, check_cost, costs_last
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.results import GradeResult, TaskResult, TestResult
from distlab.learner.folder import CourseFolder
from judging.checks import exceeds

TASK = replace(COURSE.task("1.4"), points=5, share_for_right_values=0.5)
PASSED = Verdict(Outcome.PASSED)
DEAR = verdict_on(TooDear("rank 0 sends 3 messages"))
WRONG = verdict_on(Wrong("rank 0 holds 1.0"))
CRASH = Verdict(Outcome.CRASH, "rank 1 has returned")
FIRST = "The values are right, and they cost too much: "


def a_task(*tests: tuple[str, Verdict], share: float = 0.5, missing: int = 0) -> TaskResult:
    results = [TestResult(f"test[{world}]", world, verdict, 0.1) for world, verdict in tests]
    task = replace(TASK, share_for_right_values=share)
    return TaskResult(task, "a.py", "ab", len(tests) + missing, False, results)


# --- one test ------------------------------------------------------------------------------------


def judge(*costs: str, wrong: str = "") -> None:
    """Fail costs, and then a value unless ``wrong`` is empty, as a test of the grader does."""
    with costs_last():
        for cost in costs:
            check_cost(False, cost)
        check(not wrong, wrong)


def test_a_cost_is_reported_when_all_values_of_the_test_have_proved_right() -> None:
    with pytest.raises(TooDear, match="the first"):
        judge("the first", "the second")
    with pytest.raises(Wrong, match="a value"):
        judge("a cost", wrong="a value")
    with pytest.raises(TooDear):
        check_cost(False, "outside of a test, where nothing would raise it later")


@pytest.mark.parametrize(
    ("found", "right", "is_more"),
    [
        (3, 2, True),
        (1, 2, False),
        ([2, 2, 2], [6], True),  # more calls
        ([6], [2, 2, 2], False),  # the same bytes in fewer
        ([1, 3], [2, 2], True),  # the busiest rank has more
        ({80: 4}, {40: 4}, True),
        ([[2, "float16"]], [[2, "float32"]], False),
    ],
)
def test_only_more_than_is_needed_costs_too_much(
    found: object, right: object, is_more: bool
) -> None:
    assert exceeds(found, right) is is_more


# --- one task ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "points"), [(0.0, 0), (0.5, 2), (1.0, 5)])
def test_costs_alone_leave_a_share_of_the_points(share: float, points: int) -> None:
    task = a_task(("sim", PASSED), ("sim", DEAR), ("gloo", PASSED), share=share)
    assert (task.points, task.outcome, task.has_passed) == (points, Outcome.FAILED, False)
    assert table.message(task) == f"Task 1.4: {FIRST}rank 0 sends 3 messages. guidelines.md 1.4"


@pytest.mark.parametrize("other", [("sim", WRONG), ("gloo", WRONG), ("gloo", CRASH)], ids=str)
def test_what_else_is_wrong_comes_first_and_leaves_nothing(other: tuple[str, Verdict]) -> None:
    task = a_task(("sim", DEAR), other, ("sim", DEAR))
    assert (task.verdict, task.points) == (other[1], 0)
    assert FIRST not in table.message(task)


def test_values_are_not_called_right_where_not_all_tests_have_run() -> None:
    task = a_task(("sim", DEAR), missing=1)
    assert (task.points, task.outcome_name) == (0, "failed")
    assert table.message(task) == "Task 1.4: rank 0 sends 3 messages. guidelines.md 1.4"


def test_a_share_is_not_lost_to_rounding() -> None:
    assert replace(TASK, share_for_right_values=0.29).points_for_values(100) == 29


def test_all_reports_agree() -> None:
    result = GradeResult("here", [a_task(("sim", DEAR))], 1.0)
    (in_json,) = json.loads(reports.FORMATS["json"](result))["tasks"]
    (on_page,) = json.loads(reports.FORMATS["gradescope"](result))["tests"]
    assert (in_json["outcome"], in_json["kind"], in_json["points"]) == ("failed", "too dear", 2)
    assert (on_page["status"], on_page["score"]) == ("failed", 2)
    assert FIRST in on_page["output"]
    assert "| too dear | 2/5 |" in reports.FORMATS["markdown"](result)
    assert [line.split()[2:4] for line in table.rows(result)][1] == ["too", "dear"]


# --- a run of the grader -------------------------------------------------------------------------

SUITE = """
from distlab.grade import check, check_cost, task

def nothing(lesson):
    return 1

@task("1.3")
def test_that_is_dear(grade):
    check_cost(grade.call(nothing) < 1, "a message too many")

@task("1.3")
def test_that_comes_later(grade):
    check(grade.call(nothing) == {value}, "another value")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    """A copy of the course in which right values are worth half of the points."""
    monkeypatch.chdir(tmp_path)
    copied = copy_course(tmp_path)
    write_exchange(copied, RIGHT)
    listed = tmp_path / "course.toml"
    listed.write_text(listed.read_text().replace("values = 0.0\n", "values = 0.5\n"))
    return copied


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("value", "points"), [(1, 2), (2, 0)])
def test_a_check_goes_on_after_costs_and_progress_has_the_same_points(
    here: CourseFolder, capsys: pytest.CaptureFixture[str], value: int, points: int
) -> None:
    (here.root / "tests/test_phase1.py").write_text(SUITE.format(value=value))
    assert distlab("check", "1.3") == 1
    printed = capsys.readouterr().out
    name, first = ("too dear", FIRST) if points else ("failed", "another value")
    assert f"✘ 1.3 exchange: {name} ({points}/5 points, " in printed
    assert f"Task 1.3: {first}" in printed
    assert distlab("status") == 0
    shown = capsys.readouterr().out
    num_tasks = len(COURSE.phase(1).tasks)
    assert f"  0/{num_tasks} tasks  {points}/100 points" in shown.replace("█", "").replace("░", "")
    assert ["✘", "1.3", "exchange", name] in [line.split(maxsplit=3) for line in shown.splitlines()]
