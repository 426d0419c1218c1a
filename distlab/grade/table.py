"""The terminal's output after the tests: messages that teach, then a table of tasks."""

from collections.abc import Iterator
from pathlib import Path

from distlab.course import Task, label_width
from distlab.grade.outcomes import Outcome
from distlab.grade.results import GradeResult, TaskResult
from distlab.util.text import clipped, joined, sentence

WIDTH = 100
DETAILS = 25  # number of lines of details that are shown without -v
IN_FULL = "-v of pytest, distlab check or grade"
# Questions that follow the verdict, by kind of hang; the report of a deadlock needs none.
HANGS = {
    "endless loop": "Does this loop ever end, or does it do far more than it needs to?",
    "blocked": "What does this line wait for, and who could end the wait?",
    "suspended": "Which line stops its own process?",
    "time is up": "No line of yours is known to hang: this machine may be too slow or too busy for "
    "the limit, and --world-timeout 60 gives more time.",
}
CRASHES = {
    "returned": "Does every rank take part, and wait for all that it has started?",
    "left": "Which line ends the process?",
}
TOO_DEAR = "The values are right, and they cost too much: "
INCOMPLETE = "not all tests of the task were run, and what they decide scores nothing"


def message(result: TaskResult) -> str:
    """Return ``Task 1.4: …. guidelines.md 1.4``, on one line unless the verdict has several.

    The message is "" for a task that scores all its points.
    """
    task, verdict = result.task, result.verdict
    if verdict.outcome is Outcome.PASSED:
        return "" if result.is_complete else f"Task {task.id}: {INCOMPLETE}."
    text = f"{TOO_DEAR if result.is_too_dear else ''}{verdict.message.rstrip()}"
    if verdict.outcome is Outcome.TODO:
        return text if result.is_todo else f"Task {task.id} needs another task first. {text}"
    is_drawn = text.rpartition("\n")[2].startswith(" ")  # an indented last line belongs to a table
    report = f"{text}\n" if is_drawn else f"{sentence(text)} "
    return f"Task {task.id}{_part(result)}: {report}{next_step(result)}".rstrip()


def _part(result: TaskResult) -> str:
    """Return `` (b, the second call repeats the first)`` for the part that the verdict is about."""
    if not result.task.parts or not result.tests or result.outcome is Outcome.TODO:
        return ""
    letter = result.worst.part
    return f" ({letter}, {result.task.graded_parts[letter].title})"


def parts(result: TaskResult) -> str:
    """Return ``a 4/4, b 0/3, c –`` for a failed task that is graded in parts, or ""."""
    scores = result.scores.items() if result.task.parts and result.has_failed else ()
    return ", ".join(
        f"{letter} –" if points is None else f"{letter} {points}/{part.points}"
        for letter, (points, part) in scores
    )


def lent(result: TaskResult) -> str:
    """Return ``graded with the course's 1.3 and 1.6``, or "" if nothing was lent."""
    ids = [task.id for task in result.lent]
    return f"graded with the course's {joined(ids)}" if ids else ""


def next_step(result: TaskResult) -> str:
    """Return what the learner should do or read next, given the outcome."""
    section = f"guidelines.md {result.task.id}"
    return {
        Outcome.HANG: f"{HANGS.get(result.verdict.kind, '')} {section}".lstrip(),
        Outcome.CRASH: f"{CRASHES.get(result.verdict.kind, '')} {section}".lstrip(),
        Outcome.OOM: f"What grows without end? {section}",
        Outcome.IMPORT_ERROR: "Nothing in this file can be graded until it is fixed.",
        Outcome.NOT_RUN: "",
        Outcome.GRADER_ERROR: "This is the grader's fault, not yours: it scores nothing for it.",
    }.get(result.outcome, section)


def wrong(result: GradeResult) -> list[TaskResult]:
    """Return the tasks in which there is something to fix."""
    return [task for task in result.tasks if message(task) and task.outcome is not Outcome.TODO]


def failures(result: GradeResult, *, verbose: bool) -> Iterator[str]:
    """Yield advice: the first failure in full, the others in one line each, then the next TODO."""
    tasks = wrong(result)
    for place, task in enumerate(tasks):
        cause = result.cause(task)
        if cause:
            yield f"Task {task.task.id} builds on {cause.label}: {_fix_first(cause)}."
        if place == 0 or verbose:
            yield from _whole(task, verbose=verbose)
        elif not cause:
            first, *more = message(task).splitlines()
            yield f"{clipped(first, WIDTH - 2)} …" if more else clipped(first, WIDTH)
    if len(tasks) > 1 and not verbose:
        yield f"({len(tasks) - 1} more, one line each; {IN_FULL} shows them in full)"
    yield from _next_to_write(result)


def _fix_first(cause: Task) -> str:
    return f"fix {cause.id} first"


def _next_to_write(result: GradeResult) -> Iterator[str]:
    todo = [task for task in result.tasks if task.outcome is Outcome.TODO]
    if todo:
        more = f" ({len(todo) - 1} more after it)" if len(todo) > 1 else ""
        yield f"To write next{more}: {_short(todo[0].file)}"
        yield f"  {message(todo[0])}"


def _short(file: str) -> str:
    """Return a path, relative to the working folder if it lies inside that folder."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _whole(task: TaskResult, *, verbose: bool) -> Iterator[str]:
    yield message(task)
    if not task.tests:
        return
    verdict = task.verdict
    details = verdict.details.splitlines()
    shown = details if verbose else details[-DETAILS:]
    if len(details) > len(shown):
        yield f"  … {len(details) - len(shown)} earlier lines; {IN_FULL} shows them"
    yield from (f"  {line}" for line in shown)
    if verdict.output:
        yield "  printed:"
        yield from (f"    {line}" for line in verdict.output_tail.splitlines())
    yield f"  in {task.worst.name}{f', {lent(task)}' if task.lent else ''}"
    yield ""


def rows(result: GradeResult) -> Iterator[str]:
    """Yield the lines of the table: task, function, outcome, points, seconds."""
    width = label_width(task.task for task in result.tasks)
    yield f"{'task':<6}{'function':<{width}}{'outcome':<15}{'points':>8}{'seconds':>9}"
    for task in result.tasks:
        points = f"{task.points}/{task.task.points}"
        name = "TODO" if task.outcome is Outcome.TODO else task.outcome_name
        name += "" if task.is_complete or not task.tests else " *"
        label = f"{task.task.id:<6}{task.task.label:<{width}}"
        row = f"{label}{name:<15}{points:>8}{task.seconds:>9.1f}"
        cause = result.cause(task)
        remarks = [_fix_first(cause)] if cause else []
        remarks += [text for text in (parts(task), lent(task)) if text]
        yield f"{row}  {', '.join(remarks)}" if remarks else row
    if any(task.tests and not task.is_complete for task in result.tasks):
        yield f"* {INCOMPLETE}"
    total = f"{result.points}/{result.max_points}"
    yield f"{'':<6}{'':<{width}}{'total':<15}{total:>8}{result.seconds:>9.1f}"
