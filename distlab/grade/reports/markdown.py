"""A summary for the page of a CI run."""

from distlab.grade import table
from distlab.grade.outcomes import Outcome
from distlab.grade.results import GradeResult, TaskResult


def text(result: GradeResult) -> str:
    """Return the report."""
    lines = [
        f"## {result.points} of {result.max_points} points",
        "",
        "| task | function | outcome | points | seconds |",
        "|---|---|---|---:|---:|",
        *map(_row, result.tasks),
    ]
    wrong = [t for t in result.tasks if table.message(t) and t.outcome is not Outcome.TODO]
    for task in wrong:
        lines += ["", f"**{task.task.id} {task.task.label}**", "", "```", _message(task), "```"]
    return "\n".join(lines) + "\n"


def _row(result: TaskResult) -> str:
    points = f"{result.points}/{result.task.points}"
    outcome = ", ".join(filter(None, [result.outcome.value, table.lent(result)]))
    return (
        f"| {result.task.id} | `{result.task.label}` | {outcome} | {points} "
        f"| {result.seconds:.1f} |"
    )


def _message(result: TaskResult) -> str:
    return table.message(result).replace("```", "'''")
