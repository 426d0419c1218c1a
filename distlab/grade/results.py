"""The result model: what every report and the table are made from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distlab.course import Task
from distlab.grade.outcomes import Outcome, Verdict


@dataclass(frozen=True)
class TestResult:
    """One test in one world."""

    __test__ = False  # not for pytest to collect

    name: str
    world: str
    verdict: Verdict
    seconds: float


@dataclass
class TaskResult:
    """One task: its tests, and what it scores.

    Attributes:
        expected: tests that the suite holds for it, before any selection.
        is_part: the suite was not collected as a whole.
        sha256: of the learner's file.
    """

    task: Task
    file: str
    sha256: str
    expected: int = 0
    is_part: bool = False
    tests: list[TestResult] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst of its tests'; without a test, the grader's own failure."""
        if not self.tests:
            return Verdict(Outcome.GRADER_ERROR, "the suite holds no test of it, or none was run.")
        return self.worst.verdict

    @property
    def outcome(self) -> Outcome:
        """That of the verdict."""
        return self.verdict.outcome

    @property
    def worst(self) -> TestResult:
        """The first of its worst tests; there must be one."""
        return max(self.tests, key=lambda test: test.verdict.outcome.severity)

    @property
    def is_complete(self) -> bool:
        """Whether all its tests have run; if not, it does not score."""
        return 0 < self.expected == len(self.tests) and not self.is_part

    @property
    def is_todo(self) -> bool:
        """Whether a test has found that the task's own function is still to be written."""
        missing = f"Task {self.task.id}: {self.task.function},"
        return bool(self.tests) and (
            self.outcome is Outcome.TODO and self.verdict.message.startswith(missing)
        )

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
