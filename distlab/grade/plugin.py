"""The pytest plugin: options, worlds, verdicts, the table. It fails closed.

A task scores only if each of its tests in the suite has run, has started a world, and has passed,
or has failed by its costs alone where the course gives points for right values. If anything else
happens, in the submission or in the grader itself, the task scores nothing.

PYTEST_DONT_REWRITE: a suite that is run as a script imports this before pytest can rewrite it.
"""

import platform
import random
import re
import sys
import time
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distlab import course
from distlab.grade import gpus, report_paths, reports, submission, suites, table
from distlab.grade.checks import costs_last
from distlab.grade.lending import NO_LENDER, Loan, loan_for
from distlab.grade.outcomes import AlreadyKnown, Outcome, Verdict, verdict_on
from distlab.grade.results import GradeResult, TaskResult, TestResult
from distlab.grade.running import Grade
from distlab.grade.submission import Submission
from distlab.grade.suites import in_order_of_parts, is_real_too, part_of, task_of
from distlab.sim.results.simulated import SEMANTICS

TIMEOUT_S = 10.0  # wall-clock limit of one world; the other limits catch hangs within 2 s
BACKENDS = ("auto", "sim", "gloo", "nccl")
NOT_GRADED = "nothing was graded: --collect-only lists tests and runs none"
ONE_BY_ONE = "the grader runs its tests one by one: leave -n out"
LETTERS = {
    Outcome.TODO: ("todo", "t", "TODO"),
    Outcome.FAILED: ("wrong", "F", "WRONG"),
    Outcome.HANG: ("hang", "H", "HANG"),
    Outcome.CRASH: ("crash", "C", "CRASH"),
    Outcome.OOM: ("oom", "M", "OOM"),
    Outcome.IMPORT_ERROR: ("import error", "I", "IMPORT ERROR"),
    Outcome.GRADER_ERROR: ("grader error", "E", "GRADER ERROR"),
}
_GRADE = pytest.StashKey[Grade]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the submission, the worlds, their time limit, the seed and the reports."""
    group = parser.getgroup("grading")
    group.addoption(
        "--impl",
        default="template",
        metavar="template|solution|DIR",
        help="what to grade: the templates, the solutions, or a folder laid out like the phases",
    )
    group.addoption(
        "--backend",
        default="auto",
        choices=BACKENDS,
        help="auto: simulated, and real processes where a test says so",
    )
    group.addoption(
        "--semantics",
        default="gloo",
        choices=SEMANTICS,
        help="nccl: the simulated world has GPUs, and what would be wrong on them fails",
    )
    group.addoption(
        "--lend",
        action="store_true",
        help="grade each task with the solutions' versions of those tasks that it builds on and "
        "that got no points, so that a mistake costs points only once",
    )
    group.addoption("--world-timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    group.addoption(
        "--grade-seed",
        type=int,
        default=None,
        metavar="NUMBER",
        help="seed of the random numbers that the tests draw; every failure names it",
    )
    group.addoption(
        "--report",
        action="append",
        default=[],
        metavar="FORMAT=PATH",
        help=f"write a report: {', '.join(reports.FORMATS)}; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the grader for this run.

    Raises:
        UsageError: There is no GPU for nccl, tests would be spread over processes, or the settings
            are not the course's.
    """
    config.addinivalue_line(
        "markers", "task(id, part='a', real=False): the task of course.toml it grades"
    )
    suites.check_settings(config)
    if config.getoption("backend") == "nccl" and not torch.cuda.device_count():
        raise pytest.UsageError("--backend nccl: torch sees no GPU here; see distlab doctor")
    files = [argument for argument in config.args if "test_phase" in argument]
    if files and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(f"{files[0]}: {ONE_BY_ONE}")
    config.pluginmanager.register(Grader(config), "distlab-grader")


class Grader:
    """One run of pytest: the tests of each task, and their results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.monotonic()
        self.results: dict[str, TaskResult] = {}
        self.syncs: dict[str, gpus.Places] = {}
        self._loans: dict[str, Loan | None] = {}
        self.only = self._task_filter()
        self.course_root = Path(config.rootpath)
        try:
            self.reports = report_paths.parse(config.getoption("report"))
            self.submission = submission.find(config.getoption("impl"), self.course_root)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        self.reference = submission.reference(self.course_root)
        if config.getoption("lend") and self.reference is None:
            raise pytest.UsageError(NO_LENDER)
        chosen: int | None = config.getoption("grade_seed")
        self.seed = random.SystemRandom().randrange(10_000) if chosen is None else chosen

    def _task_filter(self) -> frozenset[str]:
        """Return the ids of the tasks that ``-k`` selects, as in ``-k "1.1 or 1.3"``.

        Ids must match exactly: ``-k 1.1`` does not select task 1.10. Outside grading suites, ``-k``
        keeps pytest's meaning.
        """
        keyword = self.config.getoption("keyword")
        if not re.fullmatch(r"\s*\d+\.\d+(\s+or\s+\d+\.\d+)*\s*", keyword):
            return frozenset()
        return frozenset(re.findall(r"\d+\.\d+", keyword))

    # Collection

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a test, so that it runs once in each of its worlds."""
        mark = metafunc.definition.get_closest_marker("task")
        if mark and "grade" in metafunc.fixturenames:
            metafunc.parametrize("grade", self._worlds(mark), indirect=True)

    def _worlds(self, mark: pytest.Mark) -> list[str]:
        backend = str(self.config.getoption("backend"))
        if backend == "sim" or not is_real_too(mark):
            return ["sim"]
        return ["sim", "gloo"] if backend == "auto" else [backend]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Count each task's tests before any are deselected; keep those of the selected tasks.

        A task's tests run in the order of its parts, so that ``-x`` ends at the first that fails.
        """
        items[:] = in_order_of_parts(items)
        tasks = {task_of(item) for item in items} - {None}
        self._expect(items, sorted({str(task).partition(".")[0] for task in tasks}))
        if self.only and tasks:
            self.config.option.keyword = ""  # otherwise, pytest would also select by name
            selected = [item for item in items if task_of(item) in self.only]
            dropped = [item for item in items if task_of(item) not in self.only]
            self.config.hook.pytest_deselected(items=dropped)
            items[:] = selected

    def _expect(self, items: list[pytest.Item], phases: list[str]) -> None:
        if not phases:
            return
        if hasattr(self.config, "workerinput"):  # this process is a worker of pytest-xdist
            raise pytest.UsageError(ONE_BY_ONE)
        suites.check_environment()
        listed = course.load(self.course_root)
        for task in listed.tasks:
            if task.id.partition(".")[0] in phases and self._is_asked_for(task.id):
                file = self.submission.file(task.folder, task.lesson)
                digest = self.submission.sha256(task.folder, task.lesson)
                result = self.results[task.id] = TaskResult(task, str(file), digest)
                result.is_part = self._names_single_tests()
        for item in items:
            task_id = task_of(item)
            if task_id is not None and self._is_asked_for(task_id):
                parts = listed.task(task_id).graded_parts  # raises an error for an unlisted task
                if part_of(item) not in parts:
                    raise pytest.UsageError(f"{item.name}: {task_id} has no part {part_of(item)}")
                self.results[task_id].expect(part_of(item))

    def _is_asked_for(self, task_id: str) -> bool:
        return not self.only or task_id in self.only

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Drop the tasks whose tests were all deselected."""
        selected = {task_of(item) for item in session.items}
        for task_id, result in list(self.results.items()):
            if task_id not in selected and (result.expected or result.is_part):
                del self.results[task_id]

    def _names_single_tests(self) -> bool:
        """Return True if pytest collects only some tests: named ones or the last run's failures."""
        is_last_failed = bool(self.config.getoption("lf", False))
        return is_last_failed or any("::" in argument for argument in self.config.args)

    # Running

    def submission_for(self, result: TaskResult) -> Submission:
        """Return the submission to grade a task with, including the functions that ``--lend`` adds.

        The loan is fixed before the task's first test, and applies to all its tests.
        """
        task = result.task
        if self.reference and self.config.getoption("lend") and task.id not in self._loans:
            passed = [task_id for task_id, other in self.results.items() if other.has_passed]
            listed = course.load(self.course_root)
            loan = self._loans[task.id] = loan_for(task, listed, self.reference.root, passed)
            result.lent = loan.tasks if loan else ()
        return replace(self.submission, loan=self._loans.get(task.id))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Skip a test if the verdict on its task is already known."""
        result = self.results.get(task_of(item) or "")
        if result is not None and result.is_known:
            raise AlreadyKnown(result.verdict)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Let a grading test judge all its values before it fails because of a cost."""
        with costs_last() if task_of(pyfuncitem) else nullcontext():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn a test's result into a verdict; only the call phase counts, unless set-up fails."""
        report = yield
        task_id = task_of(item)
        if task_id is not None and task_id in self.results and _is_last_word(report):
            verdict = replace(self._verdict(item, call), output=report.capstdout)
            self._go_on_after(verdict)
            report.user_properties.append(("outcome", verdict.outcome.value))
            if verdict.outcome is not Outcome.PASSED:
                report.outcome = "failed"
                report.longrepr = verdict.message
            grade = item.stash.get(_GRADE, None)
            ran = (grade.world, grade.world_size) if grade else ("", 0)
            result = TestResult(item.name, ran[0], verdict, report.duration, ran[1], part_of(item))
            self.results[task_id].tests.append(result)
            if grade:
                gpus.merge(self.syncs.setdefault(task_id, {}), grade.gpus.syncs)
        return report

    def _go_on_after(self, verdict: Verdict) -> None:
        """Let ``-x`` and ``--maxfail`` pass over costs: whether values are right is still open."""
        if verdict.is_too_dear and self.config.option.maxfail:
            self.config.option.maxfail += 1

    def _verdict(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Verdict:
        if call.excinfo is not None:
            return verdict_on(call.excinfo.value)
        grade = item.stash.get(_GRADE, None)
        if grade is None or not grade.runs:
            return Verdict(Outcome.GRADER_ERROR, "the test did not run the submission")
        if grade.gpus.hazards:
            text = "\n".join([gpus.WRONG, *(f"  {line}" for line in grade.gpus.hazards)])
            return Verdict(Outcome.FAILED, text, kind="hazard")
        return Verdict(Outcome.PASSED)

    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, str] | None:
        """Return the category, letter and word with which pytest reports an outcome."""
        if not isinstance(report, pytest.TestReport):
            return None
        name = dict(report.user_properties).get("outcome")
        if name is None or not _is_last_word(report) or name == Outcome.PASSED.value:
            return None
        return LETTERS[Outcome(name)]

    # The end

    def result(self) -> GradeResult:
        """Return the result of the run, from which the table and the reports are made."""
        tasks = list(self.results.values())
        digests: dict[str, str] = {}
        for phase in sorted({result.task.folder for result in tasks}):
            digests |= self.submission.digests(phase)
        return GradeResult(
            str(self.submission.root),
            tasks,
            time.monotonic() - self.started,
            {"python": platform.python_version(), "torch": torch.__version__},
            digests,
            self.seed,
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the messages and the table."""
        if not self.results:
            return
        if self.config.option.collectonly:
            terminalreporter.line(NOT_GRADED)
            return
        verbose = self.config.get_verbosity() > 0
        result = self.result()
        advice = list(table.failures(result, verbose=verbose))
        if advice:
            terminalreporter.section("what to do")
        for line in advice:
            terminalreporter.line(line)
        terminalreporter.section("tasks")
        for line in table.rows(result):
            terminalreporter.line(line)
        if any(self.syncs.values()):
            terminalreporter.section(gpus.TITLE)
            for line in gpus.sync_rows(self.syncs):
                terminalreporter.line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Set the exit status, which is success only for full marks, and write the reports."""
        if not self.results:
            return
        if self.config.option.collectonly:
            session.exitstatus = session.exitstatus or pytest.ExitCode.NO_TESTS_COLLECTED
            return
        result = self.result()
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = _exit_code(result)
        try:
            reports.write(result, self.reports)
        except OSError as error:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            print(f"a report cannot be written: {error}", file=sys.stderr)


def _exit_code(result: GradeResult) -> pytest.ExitCode:
    if any(task.outcome is Outcome.GRADER_ERROR for task in result.tasks):
        return pytest.ExitCode.INTERNAL_ERROR
    return pytest.ExitCode.OK if result.has_full_marks else pytest.ExitCode.TESTS_FAILED


def _is_last_word(report: pytest.TestReport) -> bool:
    """Return True if a report decides a test: it covers the call, or a set-up that failed."""
    return report.when == "call" or (report.when == "setup" and report.failed)


@pytest.fixture
def grade(request: pytest.FixtureRequest) -> Grade:
    """Return the object with which a test runs the submission."""
    grader = request.config.pluginmanager.get_plugin("distlab-grader")
    mark = request.node.get_closest_marker("task")
    if mark is None or not isinstance(grader, Grader):
        raise pytest.UsageError(f"{request.node.name} uses grade: mark it with @task(…)")
    result = grader.results[str(mark.args[0])]
    timeout_s = float(request.config.getoption("world_timeout"))
    run = Grade(
        *(grader.submission_for(result), result.task, request.param, timeout_s),
        seed=grader.seed,
        reference=grader.reference,
        semantics=request.config.getoption("semantics"),
    )
    request.node.stash[_GRADE] = run
    return run


def main(suite: str) -> int:
    """Grade a suite that is run as a script, such as ``python tests/test_phase1.py``."""
    return int(pytest.main([suite, *sys.argv[1:]]))
