"""The grader graded: known-wrong submissions are rejected as they say, unusual but right ones pass.

A file of the bank holds what replaces the solution's. Its docstring says what is wrong, then

    rejected by: the test that must reject it
    outcome: what that test must find; "failed" if left out
    phrase: of the message that it must give

or the one word ``right``.
"""

import compileall
import importlib
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from distlab.course import Task, load
from distlab.grade.outcomes import Outcome, Verdict, verdict_on
from distlab.grade.plugin import TIMEOUT_S
from distlab.grade.results import MAX_HANGS
from distlab.grade.running import Grade
from distlab.grade.submission import Submission

ROOT = Path(__file__).parents[2]
BANK = Path(__file__).parent
COURSE = load(ROOT)


@dataclass(frozen=True)
class Answer:
    """One file of the bank."""

    path: Path

    @property
    def name(self) -> str:
        """Task and file: ``1.4 all_send_first``."""
        return f"{self.task.id} {self.path.stem}"

    @cached_property
    def task(self) -> Task:
        """The task that it answers."""
        return COURSE.task(self.path.parent.name.replace("_", "."))

    @cached_property
    def says(self) -> dict[str, str]:
        """The lines ``key: value`` of its docstring."""
        docstring = self.path.read_text().split('"""')[1]
        return dict(re.findall(r"^(rejected by|outcome|phrase): (.+)$", docstring, re.MULTILINE))

    @property
    def is_right(self) -> bool:
        """Whether it must pass."""
        return "rejected by" not in self.says


ANSWERS = [Answer(path) for path in sorted(BANK.glob("phase*/*/*.py"))]
WRONG = [answer for answer in ANSWERS if not answer.is_right]
RIGHT = [answer for answer in ANSWERS if answer.is_right]


def submission_of(answer: Answer, folder: Path) -> Submission:
    """Build a hand-in: the solutions, and the answer at the end of its lesson."""
    phase = answer.task.folder
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "solutions" / phase, folder / phase, ignore=ignored)
    lesson = folder / phase / f"{answer.task.lesson}.py"
    lesson.write_text(f"{lesson.read_text()}\n\n{answer.path.read_text()}")
    for file in (folder / phase).glob("*.py"):
        text = file.read_text().replace(f"solutions.{phase}", phase)
        file.write_text(text.replace("from solutions import", "import"))
    compileall.compile_dir(folder, quiet=1)  # once, where each world would do it
    return Submission(folder)


def verdicts(answer: Answer, folder: Path) -> Iterator[tuple[str, Verdict]]:
    """Run all tests of the answer's task, without pytest around them: test, and its verdict.

    A right answer meets every case in the simulated world, and the last case on real processes. A
    wrong one meets, in the simulated world, every case of the test that must reject it, and the
    last case of all others, until two have hung: pytest would then run no more of them either.
    """
    submission, hangs = submission_of(answer, folder), 0
    for name, test, is_real in each_test_of(answer.task):
        cases = parameters(test)
        is_whole = answer.is_right or name == answer.says["rejected by"]
        if hangs >= MAX_HANGS and not is_whole:
            continue
        worlds = [("sim", values) for values in (cases if is_whole else cases[-1:])]
        if is_real and answer.is_right:
            worlds.append(("gloo", cases[-1]))
        for world, values in worlds:
            grade = Grade(submission, answer.task, world, TIMEOUT_S)
            verdict = verdict_of(test, grade, values)
            hangs += verdict.outcome is Outcome.HANG
            yield name, verdict


def each_test_of(task: Task) -> Iterator[tuple[str, Callable[..., None], bool]]:
    """Yield name, test and whether it runs on real processes too."""
    suite = importlib.import_module(f"test_phase{task.id.partition('.')[0]}")
    for name, test in inspect.getmembers(suite, inspect.isfunction):
        marks = {mark.name: mark for mark in getattr(test, "pytestmark", [])}
        if "task" in marks and marks["task"].args[0] == task.id:
            yield name, test, bool(marks["task"].kwargs.get("real"))


def parameters(test: Callable[..., None]) -> list[dict[str, Any]]:
    """Expand ``parametrize``."""
    marks = [mark.args for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    cases: list[dict[str, Any]] = [{}]
    for names, values in marks:
        keys = names.split(",") if isinstance(names, str) else list(names)
        rows = [value if len(keys) > 1 else (value,) for value in values]
        more = [dict(zip(keys, row, strict=True)) for row in rows]
        cases = [{**case, **added} for case in cases for added in more]
    return cases


def verdict_of(test: Callable[..., None], grade: Grade, values: dict[str, Any]) -> Verdict:
    try:
        test(grade, **values)
    except Exception as error:
        return verdict_on(error)
    assert grade.runs, "the test has not run the submission"
    return Verdict(Outcome.PASSED)


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: answer.name)
def test_wrong_answers_are_rejected_as_they_say(answer: Answer, tmp_path: Path) -> None:
    found = list(verdicts(answer, tmp_path))
    named, wanted = answer.says["rejected by"], Outcome(answer.says.get("outcome", "failed"))
    told = "\n".join(
        f"{name}: {verdict.outcome.value}: {verdict.message}" for name, verdict in found
    )
    assert Outcome.GRADER_ERROR not in {verdict.outcome for _, verdict in found}, told
    assert any(
        name == named and verdict.outcome is wanted and answer.says["phrase"] in verdict.message
        for name, verdict in found
    ), told


@pytest.mark.parametrize("answer", RIGHT, ids=lambda answer: answer.name)
def test_unusual_but_right_answers_pass(answer: Answer, tmp_path: Path) -> None:
    for name, verdict in verdicts(answer, tmp_path):
        assert verdict.outcome is Outcome.PASSED, f"{name}: {verdict.message}"


def test_every_task_has_three_wrong_answers_and_a_right_one() -> None:
    for task in COURSE.tasks:
        wrong = [answer for answer in WRONG if answer.task is task]
        right = [answer for answer in RIGHT if answer.task is task]
        assert len(wrong) >= 3, f"{task.id} has {len(wrong)} wrong answers"
        assert right, f"{task.id} has no right answer"


def test_the_table_in_the_documentation_counts_the_bank() -> None:
    """What is rejected, the tests above say; ``table.py`` writes it anew."""
    rows = re.findall(
        r"^\| (all|[\d.]+)[^|]* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|",
        (ROOT / "docs" / "grading.md").read_text(),
        re.MULTILINE,
    )
    counts = {task: tuple(map(int, numbers)) for task, *numbers in rows}
    expected = {"all": (len(WRONG), len(WRONG), len(RIGHT), 0)}
    for task in COURSE.tasks:
        wrong = sum(answer.task is task for answer in WRONG)
        right = sum(answer.task is task for answer in RIGHT)
        expected[task.id] = (wrong, wrong, right, 0)
    assert counts == expected
