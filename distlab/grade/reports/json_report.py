"""JSON: the complete result of a run, for other programs."""

import json
from typing import Any

from distlab.grade import table
from distlab.grade.results import GradeResult, TaskResult

SCHEMA = "distlab/grade/1"


def text(result: GradeResult) -> str:
    """Return the report: the results, and the terminal's messages about them."""
    report = {
        "schema": SCHEMA,
        **result.to_json(),
        "advice": list(table.failures(result, verbose=False)),
        "tasks": [_task(task, result) for task in result.tasks],
    }
    return json.dumps(report, indent=2) + "\n"


def _task(task: TaskResult, result: GradeResult) -> dict[str, Any]:
    entry, cause = task.to_json(), result.cause(task)
    tests = entry.pop("tests")
    words = {"fix_first": cause.id if cause else None, "message": table.message(task)}
    return {**entry, **words, "tests": tests}
