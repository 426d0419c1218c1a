"""Grade the grader: wrong answers must be rejected as the bank says, and unusual ones must pass.

Here, a wrong answer is run only against the test that must reject it; ``table.py`` runs all tests.
"""

import re
from operator import attrgetter
from pathlib import Path

import pytest

from distlab.grade.outcomes import Outcome
from wrong_answers.bank import (
    COURSE,
    OWN,
    ROOT,
    Answer,
    BankError,
    changed,
    hand_in,
    load_equivalents,
)
from wrong_answers.bank import load as load_bank
from wrong_answers.grading import find_tests, verdicts

ANSWERS = load_bank(OWN)

WRONG = [answer for answer in ANSWERS if not answer.is_right]
RIGHT = [answer for answer in ANSWERS if answer.is_right]


@pytest.mark.parametrize("answer", WRONG, ids=attrgetter("id"))
def test_wrong_answers_are_rejected_as_they_say(answer: Answer, tmp_path: Path) -> None:
    tests = [test for test in find_tests(answer.task) if test.name == answer.rejected_by]
    assert tests, f"{answer.task.id} has no test {answer.rejected_by!r}"
    assert answer.phrase
    found: list[str] = []
    for test, verdict in verdicts(
        hand_in(answer.task, answer.lesson(), tmp_path), answer.task, tests
    ):
        found.append(f"{test}: {verdict.outcome.value}: {verdict.message}")
        assert verdict.outcome is not Outcome.GRADER_ERROR, found
        if verdict.outcome is Outcome(answer.outcome) and answer.phrase in verdict.message:
            return  # the other cases of the test need not reject it
    pytest.fail("\n".join(found))


@pytest.mark.parametrize("answer", RIGHT, ids=attrgetter("id"))
def test_unusual_but_right_answers_pass(answer: Answer, tmp_path: Path) -> None:
    submission = hand_in(answer.task, answer.lesson(), tmp_path)
    for test, verdict in verdicts(submission, answer.task, find_tests(answer.task)):
        assert verdict.outcome is Outcome.PASSED, f"{test}: {verdict.message}"


def test_no_test_of_a_suite_hides_another_of_its_name() -> None:
    """Suites collect judges by star imports: if two tests have the same name, one is lost."""
    for folder in sorted((ROOT / "tests").glob("phase*/")):
        files = sorted(folder.glob("judge_*.py"))
        names = [
            name
            for file in files
            for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
        ]
        assert files
        assert sorted(set(names)) == sorted(names)


def test_every_task_has_five_wrong_answers_and_a_right_one() -> None:
    for task in COURSE.tasks:
        wrong = [answer for answer in WRONG if answer.task is task]
        right = [answer for answer in RIGHT if answer.task is task]
        assert len(wrong) >= 5, f"{task.id} has {len(wrong)} wrong answers"
        assert right, f"{task.id} has no right answer"


def test_equivalent_mutants_fit_the_solutions() -> None:
    for answer in load_equivalents():
        answer.lesson()


# The format


SOLUTION = "a = 1\nb = 2\n\na = 1\nc = 3\n"


def test_a_change_replaces_lines_that_its_context_makes_unique() -> None:
    assert changed(SOLUTION, "-b = 2\n+b = 4\n") == "a = 1\nb = 4\n\na = 1\nc = 3\n"
    assert changed(SOLUTION, "\n-a = 1\n c = 3\n") == "a = 1\nb = 2\n\nc = 3\n"


def test_hunks_are_placed_in_the_solution_in_any_order() -> None:
    change = "-c = 3\n+b = 2\n@@\n b = 2\n+c = 3\n"
    assert changed(SOLUTION, change) == "a = 1\nb = 2\nc = 3\n\na = 1\nb = 2\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("-a = 1\n", "hunk 1: 2 times in the solution:\na = 1"),
        ("-b = 2\n@@\n-d = 4\n", "hunk 2: 0 times in the solution:\nd = 4"),
        ("+d = 4\n", "hunk 1: 0 times"),
        ("b = 2\n", "hunk 1: begin with ' ', '-' or '+', not as in 'b = 2'"),
        (" b = 2\n@@\n-b = 2\n\n", "two hunks change line 2"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(change: str, problem: str) -> None:
    with pytest.raises(BankError, match=re.escape(problem)):
        changed(SOLUTION, change)


def test_an_answer_that_does_not_fit_is_named() -> None:
    task = COURSE.tasks[0]
    with pytest.raises(BankError, match=f"^{task.id} odd: hunk 1"):
        Answer(task, "odd", False, "", change="-no such line\n").lesson()
    with pytest.raises(BankError, match=f"^{task.id} odd: .*never closed"):
        Answer(task, "odd", False, "", whole="def f(\n").lesson()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[odd.x]\n", "should be [wrong.…] or [right.…]"),
        ("[wrong.x]\nsays = 'x'\n", "1.1 x: needs says, and either change or whole"),
        ("[wrong.x]\nsays = 'x'\nwhole = 'x'\nfrase = 'x'\n", "1.1 x: unknown key frase"),
        ("[wrong.x\n", "1_1.toml: "),
    ],
)
def test_a_file_that_is_no_bank_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "phase1").mkdir()
    (tmp_path / "phase1" / "1_1.toml").write_text(text)
    with pytest.raises(BankError, match=re.escape(problem)):
        load_bank(tmp_path)
