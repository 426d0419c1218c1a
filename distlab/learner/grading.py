"""Grading in another process: pytest with the course's plugin, and what its JSON report says.

The score is what the report of this very run says. Exit codes are those of ``distlab grade``.
"""

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from distlab.course import GRADER_ERROR, PASSED, Phase, Task
from distlab.learner import children, source, state
from distlab.learner.folder import CourseFolder, LearnerError

FULL_MARKS, NOT_FULL, USAGE, GRADER_FAILED, NOTHING_RAN = range(5)
PYTEST = "import runpy; runpy.run_module('pytest', run_name='__main__', alter_sys=True)"
REMEMBERING = "distlab.learner.remembering"  # what pytest would do without these commands
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
    message: str = ""


@dataclass(frozen=True)
class Grading:
    """What came of one run of the grader.

    Attributes:
        code: 0 full marks, 1 not, 3 the grader failed, 4 nothing ran; 2 bad arguments.
        tasks: by id; none if the grader failed.
        advice: the grader's messages for the learner; may be empty.
        output: all that pytest printed.
        digests: of the learner's functions when it began, by task.
    """

    code: int
    tasks: dict[str, TaskGrade]
    advice: str = ""
    output: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)


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
    """Return ``FORMAT=PATH`` with a path that holds in any folder; makes the folder of the file.

    Raises:
        LearnerError: there is no such format, or the path cannot be written.
    """
    name, _, path = option.partition("=")
    if name not in REPORTS or not path:
        raise LearnerError(f"--report {option}: write FORMAT=PATH with one of {', '.join(REPORTS)}")
    reason = _why_not_written(Path(path))
    if reason:
        raise LearnerError(f"--report {option}: {reason}")
    return f"{name}={os.path.abspath(path)}"  # /dev/stdout must not become what it is here


def _why_not_written(path: Path) -> str:
    """Try what can be tried without touching the file, "" if nothing speaks against it."""
    try:
        if path.is_dir():
            return f"{path} is a folder; name a file"
        if path.exists():
            return "" if os.access(path, os.W_OK) else f"{path} cannot be written"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"


def world_timeout(seconds: float | None) -> list[str]:
    """Return pytest's arguments for the time of one world, none for its own default.

    Raises:
        LearnerError: that is no time.
    """
    if seconds is None:
        return []
    if not 0 < seconds < math.inf:
        raise LearnerError(f"--world-timeout {seconds:g}: a number of seconds above 0")
    return ["--world-timeout", str(seconds)]


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
    with tempfile.TemporaryDirectory(prefix="distlab-") as parent:
        report = Path(parent, "report.json")  # never an old one, or one that others write
        asked = [*arguments, "-p", f"no:{REMEMBERING}", "--report", f"json={report}"]
        digests = {task.id: source.digest(folder, task) for task in folder.course.tasks}
        code, output = (run or captured_in(folder))(asked)
        grading = _grading(code, report, output)
    return replace(grading, advice=_advice(output), output=output, digests=digests)


def captured_in(folder: CourseFolder) -> Run:
    """Return what runs pytest in a fresh process and keeps its output."""
    return partial(_run, folder, is_shown=False)


def shown_in(folder: CourseFolder) -> Run:
    """Return what runs pytest in a fresh process that prints as it goes."""
    return partial(_run, folder, is_shown=True)


def _run(folder: CourseFolder, arguments: list[str], *, is_shown: bool) -> tuple[int, str]:
    """Run pytest until it ends, or this process is told to; ctrl-C is for this one alone."""
    with children.ended_with_us():
        done = subprocess.run(
            children.command(PYTEST, *arguments),
            stdout=None if is_shown else subprocess.PIPE,
            stderr=None if is_shown else subprocess.STDOUT,
            cwd=folder.root,
            env=environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    return done.returncode, done.stdout or ""


def environment() -> dict[str, str]:
    """Return this process's, such that its own distlab is the one that is imported.

    Plugins of pytest that happen to be installed stay out: they take longer than a task.
    """
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **own}


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
        keys = [field.name for field in fields(TaskGrade)]
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
        task.id: state.Record(_outcome(grading.tasks[task.id]), grading.digests.get(task.id, ""))
        for task in folder.course.tasks
        if task.id in grading.tasks
    }
    return state.remember(folder, records)


def _outcome(task: TaskGrade) -> str:
    """Passed is what scores; tests that passed but were not all run do not."""
    has_scored = task.outcome != PASSED or task.points == task.max_points
    return task.outcome if has_scored else GRADER_ERROR
