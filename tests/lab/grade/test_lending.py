"""``--lend``: a task's prerequisites come from the solutions, so a mistake costs points once."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import COURSE, PHASE, ROOT, hand_in
from processes import FreshPytest

from distlab.grade import reports
from distlab.grade.lending import Loan, loan_for
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.results import GradeResult, TaskResult, TestResult
from distlab.grade.running import Grade
from distlab.grade.submission import Submission
from distlab.launch import LaunchError

SOLUTIONS = ROOT / "solutions"
KEEPS_ITS_OWN = (
    "\n\ndef exchange(outgoing, dst, incoming, src, group=None):\n    incoming.zero_()\n"
)
LENT = "graded with the course's 1.3"


def loan(task: str, *passed: str) -> Loan:
    lent = loan_for(COURSE.task(task), COURSE, SOLUTIONS, passed)
    assert lent
    return lent


def called(handed_in: Submission, task: str, body: Callable[..., Any]) -> Any:
    """Call ``body`` with a task's lesson, as if grading it with a loan; return the result."""
    lending = replace(handed_in, loan=loan(task))
    return Grade(lending, COURSE.task(task), "sim", TIMEOUT_S).call(body)


# --- the whole suite -----------------------------------------------------------------------------

Table = dict[str, dict[str, Any]]  # a report's tasks, by id


@pytest.fixture(scope="module")
def wrong_exchange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hand-in in which Task 1.3 is wrong; everything else is copied from the solutions."""
    folder = tmp_path_factory.mktemp("handed_in")
    solved = (SOLUTIONS / PHASE / "collectives.py").read_text()
    before, head, behind = solved.partition("def broadcast(")
    hand_in(folder, collectives=f"{before}{KEEPS_ITS_OWN}\n\n{head}{behind}")
    return folder


def graded(fresh_pytest: FreshPytest, folder: Path, report: Path, *options: str) -> Table:
    done = fresh_pytest(
        *("tests/test_phase1.py", "--impl", folder, "-k", "1.3 or 1.7 or 1.8", *options),
        *("--report", f"json={report}", "-q"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return {task["id"]: task for task in json.loads(report.read_text())["tasks"]}


def test_with_a_loan_it_costs_its_own_points_on_simulated_and_on_real_ranks(
    fresh_pytest: FreshPytest, wrong_exchange: Path, tmp_path: Path
) -> None:
    tasks = graded(fresh_pytest, wrong_exchange, tmp_path / "a.json", "--lend")
    assert {id: task["outcome"] for id, task in tasks.items()} == {
        "1.3": "failed",
        "1.7": "passed",
        "1.8": "passed",
    }
    assert {test["world"] for test in tasks["1.7"]["tests"]} == {"sim", "gloo"}
    assert {id: task["lent"] for id, task in tasks.items()} == {
        "1.3": [],
        "1.7": ["1.3"],
        "1.8": ["1.3", "1.4", "1.6"],  # 1.4 and 1.6 were not run; 1.7 passed, so it is not lent
    }
    assert tasks["1.8"]["points"] == COURSE.task("1.8").points


# --- lent tasks ----------------------------------------------------------------------------------


def test_what_a_task_builds_on_is_lent_and_not_the_task_itself() -> None:
    assert [task.id for task in loan("1.7").tasks] == ["1.3"]
    assert [task.id for task in loan("1.8").tasks] == ["1.3", "1.4", "1.6"]
    assert loan_for(COURSE.task("1.3"), COURSE, SOLUTIONS, ()) is None


def test_a_class_is_lent_whole() -> None:
    assert [task.id for task in loan("2.17").tasks] == ["2.12", "2.13", "2.14"]
    assert [task.id for task in loan("2.17", "2.12", "2.13").tasks] == ["2.14"]
    assert [task.id for task in loan("2.10").tasks] == ["2.8"]
    assert "RowParallelLinear" not in loan("2.17").hidden


# --- how a loan reaches the learner's function ---------------------------------------------------

MINE = """
def average_gradients(module, all_reduce=None, group=None):
    return "mine"


AVERAGE_GRADIENTS = {"per_parameter": average_gradients}


def train_step(average=average_gradients):
    return [average, AVERAGE_GRADIENTS["per_parameter"], average_gradients]
"""


def files_of_what_a_step_sees(lesson: Any) -> list[str]:
    return [function.__code__.co_filename for function in lesson.train_step()]


def test_defaults_and_tables_that_the_file_makes_hold_what_is_lent(tmp_path: Path) -> None:
    files = called(hand_in(tmp_path, trainer=MINE), "1.11", files_of_what_a_step_sees)
    assert files == [str(SOLUTIONS / PHASE / "trainer.py")] * 3


def file_of_broadcast(lesson: Any) -> str:
    return str(lesson.broadcast_parameters().__code__.co_filename)


def test_another_lesson_imports_what_is_lent(tmp_path: Path) -> None:
    trainer = (
        f"from {PHASE}.template_collectives import broadcast\n\n\n"
        "def broadcast_parameters():\n    return broadcast\n"
    )
    files = {"collectives": "def broadcast(x, src=0, group=None): pass\n", "trainer": trainer}
    file = called(hand_in(tmp_path, **files), "1.9", file_of_broadcast)
    assert file == str(SOLUTIONS / PHASE / "collectives.py")


@pytest.mark.parametrize(
    "how",
    [
        "def exchange(x): pass\nexchange = print\n",
        "if True:\n    def exchange(x): pass\n",
        "from pprint import pprint as exchange\n",
        "",
    ],
)
def test_the_learner_s_own_is_replaced_however_it_came_there(tmp_path: Path, how: str) -> None:
    mine = f"{how}\n\ndef all_reduce_recursive_doubling():\n    return exchange\n"
    file = called(hand_in(tmp_path, collectives=mine), "1.7", file_of_exchange)
    assert file == str(SOLUTIONS / PHASE / "collectives.py")


def file_of_exchange(lesson: Any) -> str:
    return str(lesson.all_reduce_recursive_doubling().__code__.co_filename)


# --- a solution reached through a loan scores nothing --------------------------------------------

TAKES_IT = """
def all_reduce_recursive_doubling(x, group=None):
    exchange.__globals__["{name}"]{entry}(x, group)


def exchange(): pass
"""


@pytest.mark.parametrize(
    ("name", "entry"),
    [("all_reduce_recursive_doubling", ""), ("ALL_REDUCES", '["recursive_doubling"]')],
)
def test_lent_functions_do_not_lead_to_the_solution_of_the_task(
    tmp_path: Path, name: str, entry: str
) -> None:
    handed_in = hand_in(tmp_path, collectives=TAKES_IT.format(name=name, entry=entry))
    with pytest.raises(LaunchError, match="this function is not lent"):
        called(handed_in, "1.7", reduce_one)


def reduce_one(lesson: Any) -> None:
    import torch

    lesson.all_reduce_recursive_doubling(torch.ones(1))


@pytest.mark.parametrize("place", ["", "    "])
def test_a_submission_still_cannot_import_the_solutions(tmp_path: Path, place: str) -> None:
    taken = f"from solutions.{PHASE}.collectives import all_reduce_recursive_doubling as f\n"
    head = "def all_reduce_recursive_doubling(x, group=None):\n"
    mine = taken + head + "    f(x)\n" if not place else head + place + taken + "    f(x)\n"
    with pytest.raises(LaunchError, match="a submission must not import solutions"):
        called(hand_in(tmp_path, collectives=mine), "1.7", reduce_one)


# --- verdicts ------------------------------------------------------------------------------------


def test_an_error_inside_a_lent_function_names_the_learner_s_line(tmp_path: Path) -> None:
    mine = (
        "import torch\n\n\ndef exchange(): pass\n\n\n"
        "def all_reduce_recursive_doubling(x, group=None):\n"
        "    exchange(x, 1, 'no tensor', 1)\n"
    )
    with pytest.raises(LaunchError) as raised:
        called(hand_in(tmp_path, template_collectives=mine), "1.7", reduce_one)
    verdict = verdict_on(raised.value)
    assert "template_collectives.py" in verdict.details
    assert "exchange(x, 1, 'no tensor', 1)" in verdict.details
    assert str(SOLUTIONS) not in verdict.message + verdict.details


# --- reports -------------------------------------------------------------------------------------


def a_result(outcome: Outcome) -> GradeResult:
    """Return results in which Task 1.3 failed, and 1.7 was graded with the course's 1.3."""
    tasks = []
    for task_id, verdict in (("1.3", Outcome.FAILED), ("1.7", outcome)):
        task = COURSE.task(task_id)
        test = TestResult("test_it", "sim", Verdict(verdict, "It is wrong."), 0.1)
        result = TaskResult(task, "file.py", "", expected=1, tests=[test])
        lent = loan_for(task, COURSE, SOLUTIONS, ())
        result.lent = lent.tasks if lent else ()
        tasks.append(result)
    return GradeResult("here", tasks, 1.0)


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.FAILED, Outcome.TODO])
@pytest.mark.parametrize("kind", ["junit", "gradescope", "markdown"])
def test_every_report_says_what_was_lent(kind: str, outcome: Outcome) -> None:
    text = reports.FORMATS[kind](a_result(outcome))
    assert text.count(LENT) == 1
