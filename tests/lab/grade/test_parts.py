"""Tasks that are graded in parts: points, the verdict that is shown, reports, and the order."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import COURSE, copy_course

from distlab.course import Part
from distlab.grade import table, task
from distlab.grade.checks import TooDear, Wrong
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.results import TaskResult, TestResult
from distlab.grade.suites import in_order_of_parts
from distlab.learner import state, status

TASK = replace(
    COURSE.task("1.4"),
    points=8,
    parts=(Part("values", 4), Part("messages", 3), Part("errors", 1)),
    share_for_right_values=0.5,
)
PASSED = Verdict(Outcome.PASSED)
WRONG, DEAR = verdict_on(Wrong("a value")), verdict_on(TooDear("a cost"))


def result_of(*tests: tuple[str, Verdict], missing: str = "") -> TaskResult:
    """Return the result of tests, given by part and verdict; ``missing`` have not run."""
    results = [TestResult(f"test_{p}", "sim", verdict, 0.1, 2, p) for p, verdict in tests]
    result = TaskResult(TASK, "a.py", "ab", tests=results)
    for part in [*(part for part, _ in tests), *missing]:
        result.expect(part)
    return result


ALL = ("a", PASSED), ("b", PASSED), ("c", PASSED)


@pytest.mark.parametrize(
    ("result", "points", "shown"),
    [
        (result_of(*ALL), 8, ""),
        (result_of(*ALL[:2], ("c", WRONG)), 7, "a 4/4, b 3/3, c 0/1"),
        (result_of(*ALL[:1], ("b", WRONG), ALL[2]), 4, "a 4/4, b 0/3, c –"),
        (result_of(("a", WRONG), *ALL[1:]), 0, "a 0/4, b –, c –"),
        (result_of(*ALL, ("a", WRONG)), 0, "a 0/4, b –, c –"),
        (result_of(*ALL[:1], ("b", DEAR), ALL[2]), 6, "a 4/4, b 1/3, c 1/1"),
        (result_of(*ALL[:1], ("b", WRONG), missing="c"), 4, "a 4/4, b 0/3, c –"),
        (result_of(*ALL[:1], ("b", WRONG), missing="a"), 0, "a 0/4, b –, c –"),
        (result_of(*ALL[:2], missing="c"), 7, ""),
    ],
    ids=["all", "c", "b", "a", "half of a", "b by its cost", "not run", "a not run", "no failure"],
)
def test_a_part_scores_once_all_before_it_have_passed(
    result: TaskResult, points: int, shown: str
) -> None:
    assert result.points == points
    assert table.parts(result) == shown
    assert result.has_passed == (points == 8)


def test_a_part_whose_tests_were_not_collected_scores_nothing() -> None:
    result = result_of(*ALL[:1], ("b", WRONG))
    result.is_part = True
    assert result.points == 0


def test_the_verdict_is_that_of_the_first_part_that_fails() -> None:
    crash = Verdict(Outcome.CRASH, "rank 1 has returned")
    result = result_of(ALL[0], ("c", crash), ("b", WRONG))
    assert table.message(result).startswith("Task 1.4 (b, messages): a value")
    assert "(4/8 points: a 4/4, b 0/3, c –, " in status.verdict(result)


def test_a_first_part_that_fails_on_real_processes_alone_decides() -> None:
    result = result_of(("b", WRONG))
    real = TestResult("test_a", "gloo", verdict_on(Wrong("on gloo")), 0.1, 2, "a")
    result.tests.append(real)
    result.expect("a")
    assert table.message(result).startswith("Task 1.4 (a, values): on gloo")


def test_a_task_with_an_unwritten_function_scores_nothing() -> None:
    todo = Verdict(Outcome.TODO, "broadcast", missing=("1.4", "broadcast"))
    assert result_of(ALL[0], ("b", todo), missing="c").points == 0


def test_costs_of_an_earlier_part_come_after_values_of_a_later_one() -> None:
    result = result_of(("a", DEAR), ALL[1], ("c", WRONG))
    assert (result.verdict, result.points) == (WRONG, 2 + 3)


def test_points_of_parts_survive_a_report_and_count_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = copy_course(tmp_path)
    result = result_of(*ALL[:1], ("b", WRONG), missing="c")
    entry = result.to_json()
    assert entry["parts"] == {"a": 4, "b": 0, "c": None}
    again = TaskResult.from_json(entry, COURSE)
    assert [test.part for test in again.tests] == ["a", "b"]
    assert replace_task(again).points == 4
    progress = state.remember_results(here, [result], {})
    assert progress.points(here.task("1.4")) == 4
    assert state.load(here).points(here.task("1.4")) == 4


def replace_task(result: TaskResult) -> TaskResult:
    """Return a result that was read with the course's task, as one of the task in parts."""
    return replace(result, task=TASK)


def test_tests_run_in_the_order_of_their_parts() -> None:
    def item(name: str, *marks: pytest.Mark) -> Any:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: next(iter(marks), None))

    second, first = (task("1.4", part=part).mark for part in "ba")
    other = task("1.3").mark
    items = [item("b", second), item("other", other), item("a", first), item("of the lab")]
    order = [item.nodeid for item in in_order_of_parts(items)]
    assert order == ["a", "b", "other", "of the lab"]
