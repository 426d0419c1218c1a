"""Grading in another process: pytest with the course's plugin, and what its JSON report says.

The score is what the report of this very run says. Exit codes are those of ``distlab grade``.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distlab.course import GRADER_ERROR, PASSED, TODO, Phase, Task
from distlab.grade import report_paths
from distlab.grade.lending import LEND, NO_LENDER
from distlab.learner import child_processes, source, state, templates
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.lessons import SOLUTIONS
from distlab.util.text import signal_name

FULL_MARKS, NOT_FULL, USAGE, GRADER_FAILED, NOTHING_RAN = range(5)
PYTEST = "import runpy; runpy.run_module('pytest', run_name='__main__', alter_sys=True)"
REMEMBERING = "distlab.learner.pytest_progress"  # what pytest would do without these commands
NO_PYTEST = "grading needs pytest, which is not installed here: pip install pytest"
NOT_INHERITED = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
REPORTS = tuple(report_paths.HEADS)

Run = Callable[[list[str]], "tuple[int, str]"]  # arguments of pytest -> its exit code and output


@dataclass(frozen=True)
class TaskGrade:
    """What the grader said of one task.

    Attributes:
        kind: of its outcome, a short word: "deadlock", "endless loop", "wrong".
        write_next: the task and the function that a TODO waits for; an earlier one, perhaps.
        world_size: ranks of the world that decided it, if one did.
        lent: ids of the tasks whose functions came from the solutions.
    """

    id: str
    outcome: str
    points: int
    max_points: int
    seconds: float
    kind: str = ""
    write_next: tuple[str, str] | None = None
    world_size: int | None = None
    lent: tuple[str, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Whether it could not be judged, because an earlier task is still to be written."""
        return (
            self.outcome == TODO and self.write_next is not None and self.write_next[0] != self.id
        )


@dataclass(frozen=True)
class Grading:
    """What came of one run of the grader.

    Attributes:
        code: 0 full marks, 1 not, 3 the grader failed, 4 nothing ran; 2 bad arguments.
        tasks: by id; none if the grader failed.
        advice: the grader's lines for the learner; may be empty.
        output: all that pytest printed.
        digests: of the learner's functions when it began, by task.
        lends: whether it was run with ``--lend``.
    """

    code: int
    tasks: dict[str, TaskGrade]
    advice: tuple[str, ...] = ()
    output: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    lends: bool = False


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


def find_reports(options: Sequence[str]) -> list[str]:
    """Return pytest's arguments for reports, with paths that hold in any folder.

    Makes their folders, and removes earlier reports at once: pytest may fail before it would.

    Raises:
        LearnerError: there is no such format, or nothing may or can be written there.
    """
    try:
        chosen = report_paths.parse(options)
    except ValueError as error:
        raise LearnerError(str(error)) from None
    return [text for name, path in chosen for text in ("--report", f"{name}={path}")]


def world_timeout(seconds: float | None) -> list[str]:
    """Return pytest's arguments for the time of one world, none for its own default.

    Raises:
        LearnerError: that is no time.
    """
    if seconds is None:
        return []
    if not 0 < seconds < math.inf:
        raise LearnerError(f"--world-timeout {seconds:g}: must be a number of seconds above 0")
    return ["--world-timeout", str(seconds)]


def lending(folder: CourseFolder, is_asked_for: bool) -> list[str]:
    """Return pytest's arguments to lend what a task builds on.

    Raises:
        LearnerError: this copy of the course has nothing to lend.
    """
    if is_asked_for and not (folder.root / SOLUTIONS).is_dir():
        raise LearnerError(NO_LENDER)
    return [LEND] * is_asked_for


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
    """Run the grader, by default in a fresh process whose output is kept for the reader.

    Raises:
        LearnerError: pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise LearnerError(NO_PYTEST)
    with tempfile.TemporaryDirectory(prefix="distlab-") as parent:
        report = Path(parent, "report.json")  # never an old one, or one that others write
        asked = [*arguments, "-p", f"no:{REMEMBERING}", "--report", f"json={report}"]
        digests = {task.id: source.digest(folder, task) for task in folder.course.tasks}
        code, output = (run or captured_in(folder))(asked)
        grading = _grading(code, *_read(report))
    return replace(grading, output=output, digests=digests, lends=LEND in arguments)


def captured_in(folder: CourseFolder) -> Run:
    """Return what runs pytest in a fresh process and keeps its output."""
    return partial(_run, folder, is_shown=False)


def shown_in(folder: CourseFolder) -> Run:
    """Return what runs pytest in a fresh process that prints as it goes."""
    return partial(_run, folder, is_shown=True)


def _run(folder: CourseFolder, arguments: list[str], *, is_shown: bool) -> tuple[int, str]:
    """Run pytest until it ends, or this process is told to; ctrl-C is for this one alone."""
    with child_processes.ended_with_us():
        process = subprocess.Popen(
            child_processes.command(PYTEST, *arguments),
            stdout=_shown_on(sys.stdout) if is_shown else subprocess.PIPE,
            stderr=_shown_on(sys.stderr) if is_shown else subprocess.STDOUT,
            cwd=folder.root,
            env=environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        output = _output(process)
    if process.returncode < 0:
        name = signal_name(-process.returncode)
        print(f"the grader's process was stopped, or ended by {name}", file=sys.stderr)
    return process.returncode, output


def _shown_on(stream: object) -> int | None:
    """Our own output, for a child; one that was closed is nowhere."""
    return subprocess.DEVNULL if stream is None else None


def _output(process: "subprocess.Popen[str]") -> str:
    """Wait for the end of a process; whatever cuts this off ends it."""
    try:
        with child_processes.not_left_stopped(process):
            return process.communicate()[0] or ""
    except BaseException:
        process.kill()
        process.wait()
        raise


def environment() -> dict[str, str]:
    """Return this process's, such that its own distlab is the one that is imported.

    Plugins of pytest that happen to be installed stay out: they take longer than a task. So do
    options and plugins that the environment names: they would change what is graded.
    """
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {**inherited, **own}


def _grading(code: int, tasks: dict[str, TaskGrade], advice: tuple[str, ...]) -> Grading:
    """Judge a run: whatever is not a complete report of tests that ran is the grader's failure."""
    if code == 4:
        return Grading(USAGE, {})
    if code == 5:
        return Grading(NOTHING_RAN, {})
    has_failed = any(task.outcome == GRADER_ERROR for task in tasks.values())
    if code not in (0, 1) or not tasks or has_failed:
        return Grading(GRADER_FAILED, tasks, advice)
    is_full = code == 0 and all(task.points == task.max_points for task in tasks.values())
    return Grading(FULL_MARKS if is_full else NOT_FULL, tasks, advice)


def _read(report: Path) -> tuple[dict[str, TaskGrade], tuple[str, ...]]:
    """Return the grades and the advice of a report, nothing of one that is not whole."""
    try:
        table = json.loads(report.read_text(encoding="utf-8"))
        grades = [_grade_of(entry) for entry in table["tasks"]]
        return {grade.id: grade for grade in grades}, tuple(table.get("advice", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, ()


def _grade_of(entry: dict[str, Any]) -> TaskGrade:
    following = entry.get("write_next")
    return TaskGrade(
        id=entry["id"],
        outcome=entry["outcome"],
        points=entry["points"],
        max_points=entry["max_points"],
        seconds=entry["seconds"],
        kind=entry.get("kind", ""),
        write_next=(following["task"], following["function"]) if following else None,
        world_size=entry.get("world_size") or None,
        lent=tuple(entry.get("lent", ())),
    )


def remember(folder: CourseFolder, grading: Grading) -> state.Progress:
    """Keep the outcomes of a grading of the learner's own files."""
    templates.keep(folder)
    records = {
        task.id: state.Record(_outcome(grading.tasks[task.id]), grading.digests.get(task.id, ""))
        for task in folder.course.tasks
        if task.id in grading.tasks
    }
    waiting = {task.id for task in grading.tasks.values() if task.is_waiting}
    return state.remember(folder, records, waiting)


def _outcome(task: TaskGrade) -> str:
    """Passed is what scores; tests that passed but were not all run do not."""
    has_scored = task.outcome != PASSED or task.points == task.max_points
    return task.outcome if has_scored else GRADER_ERROR
