"""Grading in another process: pytest with the course's plugin, and what its JSON report says.

The score is what the report of this very run says. Exit codes are those of ``distlab grade``.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.course import GRADER_ERROR, PASSED, Phase, Task
from distlab.learner import source, state
from distlab.learner.folder import CourseFolder, LearnerError

FULL_MARKS, NOT_FULL, USAGE, GRADER_FAILED, NOTHING_RAN = range(5)
REPORTS = ("json", "junit", "gradescope", "markdown")

Run = Callable[[list[str]], "tuple[int, str]"]  # arguments of pytest -> its exit code and output


@dataclass(frozen=True)
class TaskGrade:
    """What the grader said of one task."""

    id: str
    outcome: str
    points: int
    max_points: int
    seconds: float


@dataclass(frozen=True)
class Grading:
    """What came of one run of the grader.

    Attributes:
        code: 0 full marks, 1 not, 3 the grader failed, 4 nothing ran; 2 bad arguments.
        tasks: by id; none if the grader failed.
        advice: the grader's messages for the learner; may be empty.
        output: all that pytest printed.
    """

    code: int
    tasks: dict[str, TaskGrade]
    advice: str = ""
    output: str = ""


def find_impl(choice: str) -> str:
    """Return what to give pytest for ``--impl``, whichever folder it runs in.

    Raises:
        LearnerError: there is no such folder.
    """
    if choice in ("template", "solution"):
        return choice
    if not Path(choice).is_dir():
        raise LearnerError(f"--impl {choice}: no such folder; use template, solution or a folder")
    return str(Path(choice).resolve())


def find_report(option: str) -> str:
    """Return ``FORMAT=PATH`` with a path that holds in any folder.

    Raises:
        LearnerError: there is no such format, or no path.
    """
    name, _, path = option.partition("=")
    if name not in REPORTS or not path:
        raise LearnerError(f"--report {option}: write FORMAT=PATH with one of {', '.join(REPORTS)}")
    return f"{name}={Path(path).resolve()}"


def suites(folder: CourseFolder, phases: Sequence[Phase]) -> list[str]:
    """Return the grading suites of phases.

    Raises:
        LearnerError: one is missing.
    """
    paths = [folder.suite(phase) for phase in phases]
    for path in paths:
        if not (folder.root / path).is_file():
            raise LearnerError(f"{path} is missing: git checkout -- {path} brings it back")
    return [path.as_posix() for path in paths]


def for_task(folder: CourseFolder, task: Task) -> list[str]:
    """Return pytest's arguments to grade one task, up to its first test that fails."""
    return [*suites(folder, [folder.phase_of(task)]), "-k", task.id, "-x"]


def grade(folder: CourseFolder, arguments: Sequence[str], run: Run | None = None) -> Grading:
    """Run the grader, by default in a fresh process whose output is kept for the reader."""
    with _json_report(arguments) as (all_arguments, report):
        code, output = (run or captured_in(folder))(all_arguments)
        grading = _grading(code, report, output)
    return replace(grading, advice=_advice(output), output=output)


def captured_in(folder: CourseFolder) -> Run:
    """Return what runs pytest in a fresh process and keeps its output."""

    def run(arguments: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            **_surroundings(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        return done.returncode, done.stdout

    return run


def shown_in(folder: CourseFolder) -> Run:
    """Return what runs pytest in a fresh process that prints as it goes."""

    def run(arguments: list[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, **_surroundings(folder)).returncode, ""

    return run


def _surroundings(folder: CourseFolder) -> dict[str, Any]:
    """Say where pytest runs; ctrl-C is for this process, which then ends that one."""
    return {
        "cwd": folder.root,
        "env": environment(),
        "stdin": subprocess.DEVNULL,
        "start_new_session": True,
    }


def environment() -> dict[str, str]:
    """Return this process's, such that its own distlab is the one that is imported.

    Plugins of pytest that happen to be installed stay out: they take longer than a task.
    """
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **own}


@contextmanager
def _json_report(arguments: Sequence[str]) -> Iterator[tuple[list[str], Path]]:
    """Ask for a JSON report, or take the one that the arguments ask for."""
    asked = [argument for argument in arguments if argument.startswith("json=")]
    if asked:
        report = Path(asked[-1].removeprefix("json="))
        report.unlink(missing_ok=True)  # an old one must not be taken for this run's
        yield list(arguments), report
        return
    with tempfile.TemporaryDirectory(prefix="distlab-") as parent:
        report = Path(parent, "report.json")
        yield [*arguments, "--report", f"json={report}"], report


def _grading(code: int, report: Path, output: str) -> Grading:
    """Judge a run: whatever is not a complete report of tests that ran is the grader's failure."""
    tasks = _read(report)
    if code == 4:
        return Grading(USAGE, {})
    if code == 5:
        return Grading(NOTHING_RAN, {})
    has_failed = any(task.outcome == GRADER_ERROR for task in tasks.values())
    if code not in (0, 1) or not tasks or has_failed:
        return Grading(GRADER_FAILED, tasks)
    is_full = code == 0 and all(task.points == task.max_points for task in tasks.values())
    return Grading(FULL_MARKS if is_full else NOT_FULL, tasks)


def _read(report: Path) -> dict[str, TaskGrade]:
    try:
        entries = json.loads(report.read_text(encoding="utf-8"))["tasks"]
        keys = TaskGrade.__dataclass_fields__
        return {entry["id"]: TaskGrade(*(entry[key] for key in keys)) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _advice(output: str) -> str:
    """Cut out what the plugin says to the learner."""
    found = re.search(r"^=+ what to do =+$\n(.*?)^=+ tasks =+$", output, re.DOTALL | re.MULTILINE)
    return found[1].strip("\n") if found else ""


def remember(folder: CourseFolder, grading: Grading) -> state.Progress:
    """Keep the outcomes of a grading of the learner's own files."""
    source.keep_templates(folder)
    records = {
        task.id: state.Record(_outcome(grading.tasks[task.id]), source.digest(folder, task))
        for task in folder.course.tasks
        if task.id in grading.tasks
    }
    return state.remember(folder, records)


def _outcome(task: TaskGrade) -> str:
    """Passed is what scores; tests that passed but were not all run do not."""
    has_scored = task.outcome != PASSED or task.points == task.max_points
    return task.outcome if has_scored else GRADER_ERROR
