"""Verdicts on mistakes in Phase 2 name the cause when torch's own error is cryptic."""

import math
from pathlib import Path

import pytest
from phase2.drawings import drawn, why_stopped
from wrong_answers.bank import COURSE, OWN, ROOT, hand_in, load
from wrong_answers.changes import changed
from wrong_answers.grading import find_tests, verdicts

from distlab.grade.outcomes import Outcome
from judging.checks import short_beside

ANSWERS = {answer.id: answer for answer in load(OWN)}
OTHER_BLOCK = """\
-        block = action.chunk * self.num_stages + stage + (1 if action.kind == "F" else -1)
+        block = action.chunk * self.num_stages + stage + 1
"""
SHARED_GRAPH = """\
-        if src == dst == self.rank:
+        if src == dst == self.rank and result:
+            self.messages.arrived[next_action] = result
+        elif src == dst == self.rank:
"""
OWN_ORDER = "\n@@\n".join(
    ANSWERS[f"2.10 {name}"].change.strip("\n")
    for name in ("order_of_its_own_list", "gradients_with_a_header")
)
DIVIDED_BY_ZERO = """\
-        return float(self.mean)
+        return float(self.mean) / 0
"""


def messages_on(id: str, change: str, test: str, folder: Path) -> list[str]:
    """Run one test of a task on a changed solution; return its message for each case."""
    task = COURSE.task(id)
    lesson = changed((ROOT / task.solution).read_text(encoding="utf-8"), change)
    chosen = [one for one in find_tests(task) if one.name.startswith(test)]
    found = [verdict for _, verdict in verdicts(hand_in(task, lesson, folder), task, chosen)]
    assert {verdict.outcome for verdict in found} <= {Outcome.FAILED, Outcome.PASSED}
    return [verdict.message for verdict in found]


@pytest.mark.parametrize(
    ("change", "test", "phrases"),
    [
        (
            OTHER_BLOCK,
            "test_gradients_are_those_of_one_process",
            [
                "does the result of B in block k go to block k-1",
                "what the block before it returned?",
            ],
        ),
        (
            SHARED_GRAPH,
            "test_any_schedule_that_can_be_run_is_run",
            ["a second time", "Detach what goes from a block to the next, on the same rank too"],
        ),
        (
            OWN_ORDER,
            "test_any_schedule_that_can_be_run_is_run",
            ["Mismatch in shape", "both ranks must follow one order of all messages"],
        ),
        (
            DIVIDED_BY_ZERO,
            "test_models_of_many_kinds",
            ["in run_schedule([[F0, F1, F2, B0,", "[Sequential]", "of a tokens model, with micro-"],
        ),
    ],
    ids=["another block", "shared graph", "own order", "an exception"],
)
def test_a_pipelines_mistake_is_named(
    change: str, test: str, phrases: list[str], tmp_path: Path
) -> None:
    messages = messages_on("2.10", change, test, tmp_path)
    assert any(all(phrase in message for phrase in phrases) for message in messages), messages


def test_numbers_have_the_digits_that_tell_them_apart() -> None:
    third = [[1 / 3, 2.0, 12345678.0], math.inf]
    assert short_beside(third, [third[0], 5]) == "[[0.333333, 2.0, 12345678.0], inf]"
    assert short_beside([1 / 3], [1 / 3 + 1e-8]) == "[0.333333333]"
    assert short_beside([1 / 3 + 1e-8], [1 / 3]) == "[0.333333343]"
    assert short_beside(1 / 3, 1 / 3 + 1e-15) == "0.3333333333333333"
    assert short_beside(1 / 3, None) == "0.333333"


def test_one_stage_that_stops_has_one_question_mark() -> None:
    waiting = "B0 of stage 0 needs F0, which comes later in the same row. The question mark follows"
    assert why_stopped(drawn("B0 F0")).startswith(waiting)
    assert why_stopped(drawn("F0 B0")) == ""
