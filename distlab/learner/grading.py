"""Grading in another process: pytest with the course's plugin, and its JSON report.

Scores are taken only from the report that the same run wrote. Exit codes are those of
``distlab grade``.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from distlab.course import Phase, Task
from distlab.grade import report_paths, table
from distlab.grade.lending import LEND, NO_LENDER
from distlab.grade.outcomes import Outcome
from distlab.grade.results import GradeResult, TaskResult
from distlab.learner import child_processes, source, state, templates
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.lessons import SOLUTIONS
from distlab.util.text import signal_name

FULL_MARKS, NOT_FULL, USAGE, GRADER_FAILED, NOTHING_RAN = range(5)
VERBOSE = "-v"
PYTEST = "import runpy; runpy.run_module('pytest', run_name='__main__', alter_sys=True)"
REMEMBERING = "distlab.learner.pytest_progress"  # plugin that records users' own pytest runs
NO_PYTEST = "grading needs pytest, which is not installed here: pip install pytest"
NOT_INHERITED = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")

RunPytest = Callable[[list[str]], "tuple[int, str]"]  # arguments -> exit code and output


@dataclass(frozen=True)
class Grading:
    """One run of the grader.

    Attributes:
        code: Exit code: 0 for full marks, 1 for less, 2 for bad arguments, 3 if the grader failed,
            and 4 if nothing ran.
        result: Contents of the report; None if there is no complete report.
        output: Everything that pytest printed.
        digests: Digests of the learner's functions when the run began, by task id.
        options: Arguments passed to pytest.
    """

    code: int
    result: GradeResult | None = None
    output: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()

    @property
    def tasks(self) -> dict[str, TaskResult]:
        """The graded tasks, by id."""
        return {entry.task.id: entry for entry in self.result.tasks} if self.result else {}

    @property
    def advice(self) -> list[str]:
        """Lines in which the grader explains failures to the learner."""
        is_verbose = VERBOSE in self.options
        return list(table.failures(self.result, verbose=is_verbose)) if self.result else []

    @property
    def lends(self) -> bool:
        """True if the grader was run with ``--lend``."""
        return LEND in self.options


def find_reports(options: Sequence[str]) -> list[str]:
    """Return pytest's arguments for reports, with absolute paths.

    The reports' folders are created and earlier reports are removed now, in case pytest fails too
    early to do so.

    Raises:
        LearnerError: A format is unknown, or a path must not or cannot be written.
    """
    try:
        chosen = report_paths.parse(options)
    except ValueError as error:
        raise LearnerError(str(error)) from None
    return [text for name, path in chosen for text in ("--report", f"{name}={path}")]


def world_timeout(seconds: float | None) -> list[str]:
    """Return pytest's arguments for the time limit of one world; none if it is the default.

    Raises:
        LearnerError: The number is not positive and finite.
    """
    if seconds is None:
        return []
    if not 0 < seconds < math.inf:
        raise LearnerError(f"--world-timeout {seconds:g}: must be a number of seconds above 0")
    return ["--world-timeout", str(seconds)]


def lend_option(folder: CourseFolder, is_asked_for: bool) -> list[str]:
    """Return pytest's arguments for lending functions that tasks build on; none if not asked for.

    Raises:
        LearnerError: This copy of the course has no solutions to lend.
    """
    if is_asked_for and not (folder.root / SOLUTIONS).is_dir():
        raise LearnerError(NO_LENDER)
    return [LEND] * is_asked_for


def suites(folder: CourseFolder, phases: Sequence[Phase]) -> list[str]:
    """Return the paths of the phases' grading suites.

    Raises:
        LearnerError: A suite is missing.
    """
    paths = [folder.suite(phase) for phase in phases]
    for path in paths:
        if not (folder.root / path).is_file():
            raise LearnerError(f"{path} is missing: git checkout -- {path} brings it back")
    return [path.as_posix() for path in paths]


def for_task(folder: CourseFolder, task: Task) -> list[str]:
    """Return pytest's arguments for grading one task, up to its first failing test."""
    return [*suites(folder, [folder.phase_of(task)]), "-k", task.id, "-x"]


def grade(folder: CourseFolder, arguments: Sequence[str], run: RunPytest | None = None) -> Grading:
    """Run the grader, by default in a fresh process whose output is captured.

    Raises:
        LearnerError: pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise LearnerError(NO_PYTEST)
    digests = {task.id: source.digest(folder, task) for task in folder.course.tasks}
    with tempfile.TemporaryDirectory(prefix="distlab-") as parent:
        report = Path(parent, "report.json")  # in a new folder, which other users cannot write to
        complete = [*arguments, "-p", f"no:{REMEMBERING}", "--report", f"json={report}"]
        code, output = (run or captured_in(folder))(complete)
        result = _read(report, folder)
    return Grading(_code(code, result), result, output, digests, arguments)


def captured_in(folder: CourseFolder) -> RunPytest:
    """Return a function that runs pytest in a fresh process and captures its output."""
    return partial(_run, folder, is_shown=False)


def shown_in(folder: CourseFolder) -> RunPytest:
    """Return a function that runs pytest in a fresh process that prints as it goes."""
    return partial(_run, folder, is_shown=True)


def _run(folder: CourseFolder, arguments: list[str], *, is_shown: bool) -> tuple[int, str]:
    """Run pytest, and end it if this process ends first; ctrl-C reaches only this process."""
    with child_processes.ended_with_us():
        process = subprocess.Popen(
            child_processes.command(PYTEST, *arguments),
            stdout=None if is_shown else subprocess.PIPE,
            stderr=None if is_shown else subprocess.STDOUT,
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


def _output(process: "subprocess.Popen[str]") -> str:
    """Wait for a process and return its output; kill it if anything interrupts the wait."""
    try:
        with child_processes.not_left_stopped(process):
            return process.communicate()[0] or ""
    except BaseException:
        process.kill()
        process.wait()
        raise


def environment() -> dict[str, str]:
    """Return the environment for pytest: this process's, with this distlab first on the path.

    pytest's installed plugins are disabled, because they take longer to load than a task takes to
    grade. pytest options and plugins set in the environment are removed, because they would affect
    grading.
    """
    home = str(Path(__file__).parents[2])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {**inherited, **ours}


def _code(code: int, result: GradeResult | None) -> int:
    """Turn pytest's exit code into ours; if there is no complete report, the grader has failed."""
    if code in (4, 5):
        return {4: USAGE, 5: NOTHING_RAN}[code]
    if code not in (0, 1) or result is None or not result.tasks:
        return GRADER_FAILED
    if any(task.outcome is Outcome.GRADER_ERROR for task in result.tasks):
        return GRADER_FAILED
    return FULL_MARKS if code == 0 and result.has_full_marks else NOT_FULL


def _read(report: Path, folder: CourseFolder) -> GradeResult | None:
    """Return the contents of a report; None if it is missing or incomplete."""
    try:
        return GradeResult.from_json(json.loads(report.read_text(encoding="utf-8")), folder.course)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(folder: CourseFolder, grading: Grading) -> state.Progress:
    """Record the outcomes of grading the learner's own files."""
    templates.keep(folder)
    return state.remember_results(folder, grading.tasks.values(), grading.digests)
