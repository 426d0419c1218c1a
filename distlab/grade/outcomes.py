"""The possible outcomes of a test, and how errors become verdicts."""

import enum
import re
from dataclasses import dataclass

from distlab.grade.checks import TooDear, Wrong, WrongResult
from distlab.launch import (
    LaunchError,
    RankCrashed,
    RankExited,
    RankFailed,
    RankHung,
    RankOutOfMemory,
)
from distlab.util.text import without_repeats

OUTPUT_LINES, OUTPUT_CHARACTERS = 10, 200


class Outcome(str, enum.Enum):
    """Outcomes from best to worst; a task's outcome is the worst of its tests."""

    PASSED = "passed"
    TODO = "todo"
    FAILED = "failed"
    HANG = "hang"
    CRASH = "crash"
    OOM = "oom"
    IMPORT_ERROR = "import error"
    NOT_RUN = "not run"
    GRADER_ERROR = "grader error"

    @property
    def severity(self) -> int:
        """Position from best to worst: 0 for ``PASSED``, higher for worse outcomes."""
        return list(Outcome).index(self)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one test.

    Attributes:
        message: Text for the learner: expected value, actual value, rank and likely cause.
        details: Traceback or table of ranks; may be empty.
        output: Output of the ranks, or its last lines.
        kind: Kind of verdict, for use by programs: "wrong" for a wrong result, "too dear" for a
            right one at too high a cost, the ``kind`` of a ``LaunchError`` (such as "exception"),
            or otherwise the outcome's name.
        missing: For a TODO, the task and the function that are still to be written.
    """

    outcome: Outcome
    message: str = ""
    details: str = ""
    output: str = ""
    kind: str = ""
    missing: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Name the kind after the outcome, unless a more specific kind is given."""
        object.__setattr__(self, "kind", self.kind or self.outcome.value)

    @property
    def is_too_dear(self) -> bool:
        """True if the values of the test are right, and only its costs are too high."""
        return self.kind == TooDear.kind

    @property
    def output_tail(self) -> str:
        """The last lines that the ranks printed, each cut after 200 characters."""
        lines = without_repeats(self.output).rstrip().splitlines()
        last = [line[:OUTPUT_CHARACTERS] for line in lines[-OUTPUT_LINES:]]
        return "\n".join(["…", *last] if len(lines) > OUTPUT_LINES else last)


class LessonError(Exception):
    """A learner's file could not be imported; the message says why."""


class AlreadyKnown(Exception):
    """The verdict on a test is known without running it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


OUTSIDE = "Raised outside of your file"  # heading if a traceback has none of the learner's lines
_TRACEBACK = re.compile(rf"^(Traceback \(most recent|{OUTSIDE})", re.MULTILINE)
_BY_ERROR = (
    (RankHung, Outcome.HANG),
    (RankOutOfMemory, Outcome.OOM),
    (RankCrashed, Outcome.CRASH),
    (RankExited, Outcome.CRASH),
)
# Outcomes by exception name; a NotImplementedError is a TODO only with a template's message.
_BY_EXCEPTION = {
    "NotImplementedError": (
        Outcome.TODO,
        re.compile(
            r"NotImplementedError: "
            r"(Task (?P<task>\d+\.\d+): (?P<function>[\w.]+).*guidelines\.md#.*)"
        ),
    ),
    LessonError.__name__: (Outcome.IMPORT_ERROR, re.compile(rf"{LessonError.__name__}: (.*)")),
}
_WRONG_RESULT = re.compile(rf"^rank (\d+) of (\d+) raised [\w.]*{WrongResult.__name__}: (.*)")


def verdict_on(error: BaseException) -> Verdict:
    """Return the verdict on a test that ended with an error of the submission or the grader."""
    if isinstance(error, AlreadyKnown):
        return error.verdict
    if isinstance(error, Wrong):
        return Verdict(Outcome.FAILED, str(error), kind=error.kind)
    if isinstance(error, LaunchError):
        return _verdict_on_world(error)
    text = f"the grader failed: {type(error).__name__}: {error}"
    return Verdict(Outcome.GRADER_ERROR, text)


def _verdict_on_world(error: LaunchError) -> Verdict:
    headline, _, details = str(error).partition("\n")
    details = details.strip("\n")
    outcome, pattern = _BY_EXCEPTION.get(error.exception, (None, None))
    match = pattern and pattern.search(headline)
    if outcome and match:  # every rank raises it: leave out rank and traceback
        details = _TRACEBACK.split(details, maxsplit=1)[0].rstrip()
        names = match.groupdict()
        missing = (names["task"], names["function"]) if names else None
        return Verdict(outcome, match[1], details, missing=missing)
    if error.exception == WrongResult.__name__ and (wrong := _WRONG_RESULT.match(headline)):
        rank, size, text = wrong.groups()
        where = f"on rank {rank} of {size}, " if size != "1" else ""
        return Verdict(Outcome.FAILED, f"{where}{text}", kind="wrong")
    return Verdict(_outcome_of(error), headline, details, kind=error.kind)


def _outcome_of(error: LaunchError) -> Outcome:
    for kind, outcome in _BY_ERROR:
        if isinstance(error, kind):
            return outcome
    return Outcome.FAILED if isinstance(error, RankFailed) else Outcome.GRADER_ERROR
