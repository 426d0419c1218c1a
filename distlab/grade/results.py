"""The result model: what every report and the table are made from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distlab.course import Task, used_by
from distlab.grade.lending import Loan
from distlab.grade.outcomes import Outcome, Verdict

MAX_HANGS = 2  # of one task: each takes seconds


@dataclass(frozen=True)
class TestResult:
    """One test in one world."""

    __test__ = False  # not for pytest to collect

    name: str
    world: str
    verdict: Verdict
    seconds: float
    world_size: int = 0  # of its last world


@dataclass
class TaskResult:
    """One task: its tests, and what it scores.

    Attributes:
        expected: tests that the suite holds for it, before any selection.
        is_part: only part of the suite was collected.
        sha256: of the learner's file.
        loan: functions of other tasks that it was graded with in place of the learner's.
    """

    task: Task
    file: str
    sha256: str
    expected: int = 0
    is_part: bool = False
    tests: list[TestResult] = field(default_factory=list)
    loan: Loan | None = None

    @property
    def lent(self) -> tuple[Task, ...]:
        """The tasks whose functions were lent to it."""
        return self.loan.tasks if self.loan else ()

    @property
    def verdict(self) -> Verdict:
        """The worst of its tests'; if the suite holds none, the grader's own failure."""
        if self.tests:
            return self.worst.verdict
        if self.expected:
            what = "none of its tests were run, because pytest ended first."
            return Verdict(Outcome.NOT_RUN, what)
        what = "the suite has no test for it."
        return Verdict(Outcome.GRADER_ERROR, what)

    @property
    def outcome(self) -> Outcome:
        """That of the verdict."""
        return self.verdict.outcome

    @property
    def worst(self) -> TestResult:
        """The first of its worst tests; there must be one.

        Failures in the simulated world come first, because reports are exact there: on real
        processes the same mistake may be a crash or a hang.
        """
        exact = [test for test in self.tests if test.world == "sim"]
        decisive = [test for test in exact if test.verdict.outcome is not Outcome.PASSED]
        broken = [test for test in self.tests if test.verdict.outcome is Outcome.GRADER_ERROR]
        return max(broken or decisive or self.tests, key=lambda t: t.verdict.outcome.severity)

    @property
    def is_complete(self) -> bool:
        """Whether all its tests have run; if not, it does not score."""
        return 0 < self.expected == len(self.tests) and not self.is_part

    @property
    def is_known(self) -> bool:
        """Whether further tests would say nothing new: a TODO, or one hang after the other."""
        hangs = sum(test.verdict.outcome is Outcome.HANG for test in self.tests)
        return self.is_todo or hangs >= MAX_HANGS

    @property
    def is_todo(self) -> bool:
        """Whether a test has found that a function of the task itself is still to be written."""
        missing = self.verdict.missing
        return missing is not None and missing[0] == self.task.id

    @property
    def is_waiting(self) -> bool:
        """Whether it could not be judged, because an earlier task is still to be written."""
        return self.outcome is Outcome.TODO and not self.is_todo

    @property
    def has_failed(self) -> bool:
        """Whether it was judged and something has to be fixed, not only written."""
        fine = (Outcome.PASSED, Outcome.TODO, Outcome.NOT_RUN, Outcome.GRADER_ERROR)
        return self.outcome not in fine

    @property
    def points(self) -> int:
        """All or nothing."""
        has_passed = self.is_complete and self.outcome is Outcome.PASSED
        return self.task.points if has_passed else 0

    @property
    def seconds(self) -> float:
        """Of all its tests."""
        return sum(test.seconds for test in self.tests)


@dataclass(frozen=True)
class GradeResult:
    """One run of a suite."""

    submission: str
    tasks: Sequence[TaskResult]  # that were asked for
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # what could be imported, by SHA-256
    seed: int = 0  # of what the tests have drawn

    def cause(self, result: TaskResult) -> Task | None:
        """Return the first failed task that a failed one builds on; None if there is none.

        What was lent to it is no cause of its failure.
        """
        failed = {other.task.id for other in self.tasks if result.has_failed and other.has_failed}
        own = failed - {task.id for task in result.lent}
        used = used_by(result.task, [other.task for other in self.tasks])
        return next((task for task in used if task.id in own), None)

    @property
    def points(self) -> int:
        """What the submission scores."""
        return sum(result.points for result in self.tasks)

    @property
    def max_points(self) -> int:
        """What it could score."""
        return sum(result.task.points for result in self.tasks)

    @property
    def has_full_marks(self) -> bool:
        """Whether every task that was asked for has all its points."""
        return bool(self.tasks) and self.points == self.max_points
