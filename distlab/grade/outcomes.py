"""What can come of a test of a submission, and how an error becomes one of these."""

import enum
from dataclasses import dataclass

from distlab.grade.checks import Wrong
from distlab.launch import (
    LaunchError,
    RankCrashed,
    RankExited,
    RankFailed,
    RankHung,
    RankOutOfMemory,
)


class Outcome(str, enum.Enum):
    """From best to worst: a task's outcome is the worst of its tests'."""

    PASSED = "passed"
    TODO = "todo"
    FAILED = "failed"
    HANG = "hang"
    CRASH = "crash"
    OOM = "oom"
    IMPORT_ERROR = "import error"
    GRADER_ERROR = "grader error"

    @property
    def severity(self) -> int:
        """0 for passed, more for worse."""
        return list(Outcome).index(self)


@dataclass(frozen=True)
class Verdict:
    """What became of one test.

    Attributes:
        message: what the learner reads first: expected, got, rank, likely cause.
        details: traceback, output of ranks, roll call; may be empty.
    """

    outcome: Outcome
    message: str = ""
    details: str = ""


class LessonError(Exception):
    """A learner's file could not be imported; the message says why."""


class AlreadyKnown(Exception):
    """The verdict on a test is known without running it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


_BY_ERROR = (
    (RankHung, Outcome.HANG),
    (RankOutOfMemory, Outcome.OOM),
    (RankCrashed, Outcome.CRASH),
    (RankExited, Outcome.CRASH),
)
_BY_EXCEPTION = {"NotImplementedError": Outcome.TODO, LessonError.__name__: Outcome.IMPORT_ERROR}


def verdict_on(error: BaseException) -> Verdict:
    """Judge the error that ended a test: the submission's, or else the grader's own."""
    if isinstance(error, AlreadyKnown):
        return error.verdict
    if isinstance(error, Wrong):
        return Verdict(Outcome.FAILED, str(error))
    if isinstance(error, LaunchError):
        headline, _, details = str(error).partition("\n")
        return Verdict(_outcome_of(error), _readable(error, headline), details.strip("\n"))
    return Verdict(Outcome.GRADER_ERROR, f"the grader failed: {type(error).__name__}: {error}")


def _outcome_of(error: LaunchError) -> Outcome:
    if error.exception in _BY_EXCEPTION:
        return _BY_EXCEPTION[error.exception]
    for kind, outcome in _BY_ERROR:
        if isinstance(error, kind):
            return outcome
    return Outcome.FAILED if isinstance(error, RankFailed) else Outcome.GRADER_ERROR


def _readable(error: LaunchError, headline: str) -> str:
    """Leave out who raised it where it is every rank's: an import, a TODO."""
    if error.exception in _BY_EXCEPTION:
        return headline.partition(f"{error.exception}: ")[2] or headline
    return headline
