"""The verdicts on a submission, per test, per task and overall, and their JSON form.

    judge ─▶ Verdict ─▶ TestResult ─▶ TaskResult ─▶ GradeResult ─┬─▶ table, reports
                                                                 └─▶ JSON ─▶ the learner's commands

Everything that displays verdicts uses these classes, in this process or in one that reads the JSON
report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distlab.course import Course, Part, Task, used_by
from distlab.grade.outcomes import Outcome, Verdict

MAX_HANGS = 2  # after this many, a task's other tests are skipped: each hang takes seconds
Json = Mapping[str, Any]


@dataclass(frozen=True)
class TestResult:
    """The result of one test in one world."""

    __test__ = False  # keeps pytest from collecting it

    name: str
    world: str
    verdict: Verdict
    seconds: float
    world_size: int = 0  # number of ranks in the last world
    part: str = "a"  # letter of the part of its task that it decides

    def to_json(self) -> dict[str, Any]:
        """Return the test's entry in a report."""
        return {
            "name": self.name,
            "part": self.part,
            "world": self.world,
            "outcome": self.verdict.outcome.value,
            "kind": self.verdict.kind,
            "world_size": self.world_size,
            "message": self.verdict.message,
            "details": self.verdict.details,
            "output": self.verdict.output_tail,
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_json(cls, entry: Json, missing: tuple[str, str] | None) -> "TestResult":
        """Read a report's entry; for a TODO, ``missing`` gives the task and function to write."""
        outcome, text = Outcome(entry["outcome"]), (entry["message"], entry["details"])
        is_todo = outcome is Outcome.TODO
        verdict = Verdict(
            *(outcome, *text, entry["output"], entry["kind"]), missing if is_todo else None
        )
        return cls(
            *(entry["name"], entry["world"], verdict),
            *(entry["seconds"], entry["world_size"], entry["part"]),
        )


@dataclass
class TaskResult:
    """The result of one task: its tests and its points.

    Attributes:
        expected: Number of the task's tests in the suite, before any selection.
        expected_in: The same for each part of a task that is graded in parts, by its letter.
        is_part: True if only part of the suite was collected.
        sha256: Digest of the learner's file.
        lent: Tasks whose functions came from the solutions.
    """

    task: Task
    file: str
    sha256: str
    expected: int = 0
    is_part: bool = False
    tests: list[TestResult] = field(default_factory=list)
    lent: tuple[Task, ...] = ()
    expected_in: dict[str, int] = field(default_factory=dict)

    def expect(self, part: str) -> None:
        """Count one more test of the suite."""
        self.expected += 1
        self.expected_in[part] = self.expected_in.get(part, 0) + 1

    @property
    def verdict(self) -> Verdict:
        """The worst verdict on its tests; "not run" or a grader error if none of them ran."""
        if self.tests:
            return self.worst.verdict
        if self.expected:
            text = "none of its tests were run, because pytest ended first."
            return Verdict(Outcome.NOT_RUN, text)
        return Verdict(Outcome.GRADER_ERROR, "the suite has no test for it.")

    @property
    def outcome(self) -> Outcome:
        """The outcome of the verdict."""
        return self.verdict.outcome

    @property
    def worst(self) -> TestResult:
        """The first of its worst tests; at least one test must have run.

        Grader errors take precedence, followed by failures in the simulated world. Its reports are
        exact, whereas on real processes the same mistake may appear as a crash or a hang. Costs
        that are too high come last, because values are to be mended first. Of a task in parts,
        the first part that fails decides.
        """
        broken = [test for test in self.tests if test.verdict.outcome is Outcome.GRADER_ERROR]
        failed = [test for test in self.tests if test.verdict.outcome is not Outcome.PASSED]
        by_value = [test for test in failed if not test.verdict.is_too_dear]
        decisive = broken or by_value or failed or self.tests
        part = min(test.part for test in decisive)
        in_part = [test for test in decisive if test.part == part]
        first = [test for test in in_part if test.world == "sim"] or in_part
        return max(first, key=lambda test: test.verdict.outcome.severity)

    @property
    def world_size(self) -> int:
        """Number of ranks in the decisive world; 0 if no world was started."""
        return self.worst.world_size if self.tests else 0

    @property
    def is_complete(self) -> bool:
        """True if all its tests have run."""
        return 0 < self.expected == len(self.tests) and not self.is_part

    @property
    def is_known(self) -> bool:
        """True if more tests would not change the verdict, as after a TODO or several hangs."""
        hangs = sum(test.verdict.outcome is Outcome.HANG for test in self.tests)
        return self.is_todo or hangs >= MAX_HANGS

    @property
    def is_todo(self) -> bool:
        """True if a function of the task itself is still to be written."""
        missing = self.verdict.missing
        return missing is not None and missing[0] == self.task.id

    @property
    def is_waiting(self) -> bool:
        """True if the task could not be judged, because an earlier task is still to be written."""
        return self.outcome is Outcome.TODO and not self.is_todo

    @property
    def has_failed(self) -> bool:
        """True if the task was judged and contains a mistake, not just an unwritten function."""
        fine = (Outcome.PASSED, Outcome.TODO, Outcome.NOT_RUN, Outcome.GRADER_ERROR)
        return self.outcome not in fine

    @property
    def has_passed(self) -> bool:
        """True if all its tests have run and passed."""
        return self.is_complete and self.outcome is Outcome.PASSED

    @property
    def is_too_dear(self) -> bool:
        """True if all its tests have run, and those that failed did so by their costs alone."""
        return self.is_complete and self.verdict.is_too_dear

    @property
    def outcome_name(self) -> str:
        """The outcome in words, which tell costs that are too high from other failures."""
        return self.verdict.kind if self.is_too_dear else self.outcome.value

    @property
    def points(self) -> int:
        """Points scored: all, those of the first parts, those for right values, or none."""
        return sum(points or 0 for points, _ in self.scores.values())

    @property
    def scores(self) -> dict[str, tuple[int | None, Part]]:
        """Points scored in each part, by its letter, and the part; None after one that failed.

        A part scores if all its tests have run and passed, and so have those of the parts before
        it; if only its costs are too high, it scores the course's share for right values.
        """
        scores: dict[str, tuple[int | None, Part]] = {}
        is_right = not self.is_todo  # nothing of a task counts before all of it is written
        for letter, part in self.task.graded_parts.items():
            if not is_right:
                scores[letter] = (None, part)
                continue
            tests = [test for test in self.tests if test.part == letter]
            failed = [test.verdict for test in tests if test.verdict.outcome is not Outcome.PASSED]
            expected = self.expected_in.get(letter, 0) if self.task.parts else self.expected
            is_right = not self.is_part and 0 < expected == len(tests)
            is_right &= all(verdict.is_too_dear for verdict in failed)
            points = self.task.points_for_values(part.points) if failed else part.points
            scores[letter] = (points if is_right else 0, part)
        return scores

    @property
    def seconds(self) -> float:
        """Total time of its tests."""
        return sum(test.seconds for test in self.tests)

    def to_json(self) -> dict[str, Any]:
        """Return the task's entry in a report."""
        missing = self.verdict.missing
        return {
            "id": self.task.id,
            "function": self.task.function,
            "outcome": self.outcome.value,
            "kind": self.verdict.kind,
            "world_size": self.world_size,
            "lent": [task.id for task in self.lent],
            "write_next": missing and {"task": missing[0], "function": missing[1]},
            "points": self.points,
            "max_points": self.task.points,
            "parts": {letter: points for letter, (points, _) in self.scores.items()},
            "is_part": self.is_part,
            "seconds": round(self.seconds, 3),
            "file": self.file,
            "sha256": self.sha256,
            "tests_expected": self.expected,
            "tests_expected_in_parts": self.expected_in,
            "tests": [test.to_json() for test in self.tests],
        }

    @classmethod
    def from_json(cls, entry: Json, course: Course) -> "TaskResult":
        """Read an entry of a report."""
        missing = entry["write_next"] and (
            entry["write_next"]["task"],
            entry["write_next"]["function"],
        )
        return cls(
            course.task(entry["id"]),
            entry["file"],
            entry["sha256"],
            entry["tests_expected"],
            entry["is_part"],
            tests=[TestResult.from_json(test, missing) for test in entry["tests"]],
            lent=tuple(map(course.task, entry["lent"])),
            expected_in=entry["tests_expected_in_parts"],
        )


@dataclass(frozen=True)
class GradeResult:
    """One run of a suite.

    Attributes:
        submission: Graded folder.
        tasks: Selected tasks.
        files: SHA-256 digests of all files that the lessons could import, by path.
        seed: Seed of the random numbers that the tests drew.
    """

    submission: str
    tasks: Sequence[TaskResult]
    seconds: float
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a report's entries about the run, without those about its tasks."""
        return {
            "submission": self.submission,
            "points": self.points,
            "max_points": self.max_points,
            "seconds": round(self.seconds, 3),
            "versions": self.versions,
            "seed": self.seed,
            "files": self.files,
        }

    @classmethod
    def from_json(cls, table: Json, course: Course) -> "GradeResult":
        """Read a report.

        Raises:
            KeyError, TypeError, ValueError: The table is not a report on tasks of this course.
        """
        return cls(
            table["submission"],
            [TaskResult.from_json(entry, course) for entry in table["tasks"]],
            table["seconds"],
            *(table["versions"], table["files"], table["seed"]),
        )

    def cause(self, result: TaskResult) -> Task | None:
        """Return the first failed task that the failed task ``result`` builds on, or None.

        Tasks whose functions were lent to it cannot be the cause.
        """
        failed = [other.task for other in self.tasks if result.has_failed and other.has_failed]
        used = used_by(result.task, [other.task for other in self.tasks])
        return next((task for task in used if task in failed and task not in result.lent), None)

    @property
    def points(self) -> int:
        """Total points that the submission scores."""
        return sum(result.points for result in self.tasks)

    @property
    def max_points(self) -> int:
        """Points of all selected tasks."""
        return sum(result.task.points for result in self.tasks)

    @property
    def has_full_marks(self) -> bool:
        """True if every selected task scores all its points."""
        return bool(self.tasks) and self.points == self.max_points
