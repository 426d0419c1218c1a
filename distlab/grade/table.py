"""What the terminal shows after the tests: messages that teach, then a table of tasks."""

from collections.abc import Iterator

from distlab.grade.outcomes import Outcome
from distlab.grade.results import GradeResult, TaskResult

WIDTH = 100


def message(result: TaskResult) -> str:
    """Write ``Task 1.5: …. guidelines.md 1.5``, on one line as far as the grader has written it."""
    task, verdict = result.task, result.verdict
    if verdict.outcome is Outcome.TODO:
        return verdict.message
    return f"Task {task.id}: {_sentence(verdict.message)} {next_step(result)}"


def _sentence(text: str) -> str:
    """End it with a full stop where it has no end."""
    text = text.rstrip()
    return text if text.endswith((".", "?", "!", ":", "…")) else f"{text}."


def next_step(result: TaskResult) -> str:
    """Tell what to read, or to do, about an outcome."""
    task = result.task
    section = f"guidelines.md {task.id}"
    return {
        Outcome.HANG: f"Who waits for whom: distlab trace {task.id}; {section}",
        Outcome.CRASH: f"Does it leave, or crash, on one rank only? {section}",
        Outcome.OOM: f"What grows without end? {section}",
        Outcome.IMPORT_ERROR: "Nothing of this file can be graded before it is mended.",
        Outcome.GRADER_ERROR: "This is the grader's fault, not yours: it scores nothing for it.",
    }.get(result.outcome, section)


def failures(result: GradeResult, *, verbose: bool) -> Iterator[str]:
    """Yield what to print about tasks that failed: the first whole, further ones in one line."""
    wrong = [t for t in result.tasks if t.outcome not in (Outcome.PASSED, Outcome.TODO)]
    for place, task in enumerate(wrong):
        if place == 0 or verbose:
            yield from _whole(task, verbose=verbose)
        else:
            first, *more = message(task).splitlines()
            yield first if len(first) <= WIDTH and not more else f"{first[: WIDTH - 2]} …"
    if len(wrong) > 1 and not verbose:
        yield f"({len(wrong) - 1} more in one line each: -v shows all)"


def _whole(task: TaskResult, *, verbose: bool) -> Iterator[str]:
    yield message(task)
    if not task.tests:
        return
    verdict = task.verdict
    details = verdict.details.splitlines()
    shown = details if verbose else details[:25]
    yield from (f"  {line}" for line in shown)
    if len(details) > len(shown):
        yield f"  … {len(details) - len(shown)} more lines: -v"
    yield f"  in {task.worst.name} [{task.worst.world}]"
    yield ""


def rows(result: GradeResult) -> Iterator[str]:
    """Yield the lines of the table: task, function, outcome, points, seconds."""
    yield f"{'task':<6}{'function':<32}{'outcome':<15}{'points':>8}{'seconds':>9}"
    for task in result.tasks:
        points = f"{task.points}/{task.task.points}"
        name = "TODO" if task.outcome is Outcome.TODO else task.outcome.value
        name += "" if task.is_complete or not task.tests else " *"
        yield f"{task.task.id:<6}{task.task.function:<32}{name:<15}{points:>8}{task.seconds:>9.1f}"
    if any(task.tests and not task.is_complete for task in result.tasks):
        yield "* not all tests of the task were run: no points"
    total = f"{result.points}/{result.max_points}"
    yield f"{'':<6}{'':<32}{'total':<15}{total:>8}{result.seconds:>9.1f}"
