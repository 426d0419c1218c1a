"""Grade a submission with the tests of one task, without pytest."""

import importlib
import inspect
import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distlab.course import Task
from distlab.grade.checks import costs_last
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.running import Grade
from distlab.grade.submission import Submission, reference
from wrong_answers.bank import ROOT

Found = tuple[str, Verdict]  # a test's name, and the verdict in one of its cases


@dataclass(frozen=True)
class TaskTest:
    """A test of a task, and the cases that its ``parametrize`` lists."""

    name: str
    body: Callable[..., None]
    cases: list[dict[str, Any]]
    is_real: bool  # whether it also runs on real processes


def find_tests(task: Task) -> list[TaskTest]:
    """Return the tests of a task, in the order of the suite."""
    suite = importlib.import_module(f"test_phase{task.id.partition('.')[0]}")
    found = []
    for name, body in vars(suite).items():
        marks = getattr(body, "pytestmark", []) if inspect.isfunction(body) else []
        if any(mark.name == "task" and mark.args[0] == task.id for mark in marks):
            is_real = any(mark.kwargs.get("real") for mark in marks)
            found.append(TaskTest(name, body, _cases(marks), is_real))
    return found


def _cases(marks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the arguments of each case of ``parametrize``."""
    cases: list[dict[str, Any]] = [{}]
    for names, values in (mark.args for mark in marks if mark.name == "parametrize"):
        keys = names.split(",") if isinstance(names, str) else list(names)
        rows = [value if len(keys) > 1 else (value,) for value in values]
        more = [dict(zip(keys, row, strict=True)) for row in rows]
        cases = [{**case, **added} for case in cases for added in more]
    return cases


def verdicts(submission: Submission, task: Task, tests: Iterable[TaskTest]) -> Iterator[Found]:
    """Run every case of ``tests`` in the simulated world; yield the verdicts."""
    for test in tests:
        for case in test.cases:
            yield test.name, _verdict(submission, task, "sim", test, case)


def verdicts_on_processes(submission: Submission, task: Task) -> Iterator[Found]:
    """Run the last case of each test that is meant for real processes; yield the verdicts."""
    for test in find_tests(task):
        if test.is_real:
            yield test.name, _verdict(submission, task, "gloo", test, test.cases[-1])


class Rejection(NamedTuple):
    """A test's verdict on a submission that it rejects, and the judge's line that rejects it."""

    verdict: Verdict
    place: str


def rejections(
    submission: Submission, task: Task, tests: Iterable[TaskTest]
) -> Iterator[Rejection]:
    """Run every case of ``tests`` in the simulated world; yield only the rejections."""
    for test in tests:
        for case in test.cases:
            grade = Grade(submission, task, "sim", TIMEOUT_S, reference=reference(ROOT))
            try:
                test.body(grade, **case)
            except Exception as error:
                yield Rejection(verdict_on(error), _place_of(error))


def _place_of(error: Exception) -> str:
    """Return the file and line where a judge, or else a helper of judges, raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "tests")]
    judges = [frame for frame in places if "/phase" in frame.filename[len(str(ROOT)) :]]
    place = (judges or places)[-1]
    return f"{Path(place.filename).name}:{place.lineno}"


def first_rejection(submission: Submission, task: Task) -> Found | None:
    """Return the first rejection of the submission by a test of the task in the simulated world."""
    found = verdicts(submission, task, find_tests(task))
    return next((one for one in found if one[1].outcome is not Outcome.PASSED), None)


def pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of grading processes, spawned because forking a threaded process may hang."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def _verdict(
    submission: Submission, task: Task, world: str, test: TaskTest, case: dict[str, Any]
) -> Verdict:
    grade = Grade(submission, task, world, TIMEOUT_S, reference=reference(ROOT))
    try:
        with costs_last():
            test.body(grade, **case)
    except Exception as error:
        return verdict_on(error)
    if not grade.runs:
        return Verdict(Outcome.GRADER_ERROR, "the test did not run the submission")
    return Verdict(Outcome.PASSED)
