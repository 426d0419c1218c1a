"""Every promise of a task is judged: the ledger is complete, verbatim, and backed by the bank."""

import pytest

from distlab.course import Task
from wrong_answers import bank, ledger
from wrong_answers.grading import find_tests

WRONG = {
    (answer.task.id, answer.name): answer for answer in bank.load(bank.OWN) if not answer.is_right
}
each_task = pytest.mark.parametrize("task", bank.COURSE.tasks, ids=lambda task: task.id)


@each_task
def test_every_sentence_of_docstring_and_todo_is_in_the_ledger(task: Task) -> None:
    said, entries = ledger.contract(task), ledger.load(task).entries
    for place in ("docstring", "todo"):
        missing = ledger.not_listed(said[place], (e for e in entries if e.where == place))
        assert not missing, f"{task.id}, {place}: neither a promise nor an explanation: {missing}"


@each_task
def test_entries_stand_in_the_contract_as_they_are(task: Task) -> None:
    said = ledger.contract(task)
    for entry in ledger.load(task).entries:
        assert entry.where in ledger.PLACES
        assert ledger.folded(entry.text) in said[entry.where], (
            f"{task.id}, {entry.where} does not say: {entry.text}"
        )


@each_task
def test_every_promise_has_a_test_that_a_wrong_answer_fails(task: Task) -> None:
    tests = {test.name for test in find_tests(task)}
    for promise in ledger.load(task).promises:
        here = f"{task.id}: {promise.text}"
        assert promise.tests, f"{here}: no test"
        assert set(promise.tests) <= tests, f"{here}: no such test"
        answers = [WRONG.get((task.id, name)) for name in promise.violated_by]
        assert None not in answers, f"{here}: {promise.violated_by}: no such wrong answer"
        rejecting = {answer.rejected_by for answer in answers if answer}
        assert rejecting & set(promise.tests), (
            f"{here}: the wrong answers named are rejected by {sorted(rejecting)}"
        )


def test_a_sentence_without_an_entry_is_found() -> None:
    entries = iter([ledger.Entry("todo", "Both are posted before\n either is waited for.")])
    said = "TODO 1.4: Both are posted before either is waited for. No barrier."
    assert ledger.not_listed(said, entries) == "No barrier."
