"""Gradescope's page begins with the learner's line: it is all that students see."""

import json
from pathlib import Path

import pytest

from distlab import course
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.reports import gradescope
from distlab.grade.results import GradeResult, TaskResult, TestResult

TASK = course.load(Path(__file__).parents[3]).task("1.5")
MESSAGE = "Task 1.5: Why."
TRACEBACK = """Traceback (most recent call last):
  File "/hand_in/phase1_data_parallel/trainer.py", line 59, in broadcast_parameters
    broadcast(x)
  File "/hand_in/phase1_data_parallel/collectives.py", line 36, in broadcast
    y = x.missing
AttributeError: 'Tensor' object has no attribute 'missing'"""
WAITS = """  rank 0  send to rank 1, () float32  collectives.py:36 in exchange
  rank 1  send to rank 0, () float32  collectives.py:48 in exchange
None of them can go first."""
LOOP = "  collectives.py:101  while True:"


def shown(verdict: Verdict) -> list[str]:
    """The lines that Gradescope shows of a task."""
    result = TaskResult(TASK, "file.py", "", expected=1)
    result.tests.append(TestResult("test_it", "sim", verdict, 0.1))
    [test] = json.loads(gradescope.text(GradeResult("here", [result], 1.0)))["tests"]
    return str(test["output"]).splitlines()


@pytest.mark.parametrize(
    ("outcome", "details", "place"),
    [
        (Outcome.FAILED, TRACEBACK, "collectives.py:36"),
        (Outcome.HANG, WAITS, "collectives.py:36"),
        (Outcome.HANG, LOOP, "collectives.py:101"),
    ],
)
def test_the_line_comes_first_then_the_message_then_all_that_is_known(
    outcome: Outcome, details: str, place: str
) -> None:
    first, message, *rest = shown(Verdict(outcome, "Why.", details))
    assert first == place
    assert message.startswith(MESSAGE)
    assert rest == details.splitlines()


def test_where_no_line_is_known_the_message_comes_first() -> None:
    assert shown(Verdict(Outcome.FAILED, "Why."))[0].startswith(MESSAGE)


def test_of_many_lines_the_last_are_shown() -> None:
    lines = shown(Verdict(Outcome.FAILED, "Why.", "\n".join(map(str, range(1000)))))
    assert (len(lines), lines[-1]) == (26, "999")


def test_what_the_ranks_printed_is_not_shown() -> None:
    assert "secret" not in "".join(shown(Verdict(Outcome.FAILED, "Why.", LOOP, output="secret")))
