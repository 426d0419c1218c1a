"""Everything that is known about a run, for other programs."""

import json
from typing import Any

from distlab.course import Task
from distlab.grade import table
from distlab.grade.results import GradeResult, TaskResult, TestResult

SCHEMA = "distlab/grade/1"


def text(result: GradeResult) -> str:
    """Return the report."""
    report = {
        "schema": SCHEMA,
        "submission": result.submission,
        "points": result.points,
        "max_points": result.max_points,
        "seconds": round(result.seconds, 3),
        "versions": result.versions,
        "seed": result.seed,
        "files": result.files,
        "advice": list(table.failures(result, verbose=False)),
        "tasks": [_task(task, result.cause(task)) for task in result.tasks],
    }
    return json.dumps(report, indent=2) + "\n"


def _task(result: TaskResult, cause: Task | None) -> dict[str, Any]:
    return {
        "id": result.task.id,
        "function": result.task.function,
        "outcome": result.outcome.value,
        "kind": result.verdict.kind,
        "world_size": result.worst.world_size if result.tests else 0,
        "fix_first": cause.id if cause else None,
        "lent": [task.id for task in result.lent],
        "write_next": _write_next(result),
        "message": table.message(result),
        "points": result.points,
        "max_points": result.task.points,
        "seconds": round(result.seconds, 3),
        "file": result.file,
        "sha256": result.sha256,
        "tests_expected": result.expected,
        "tests": [_test(test) for test in result.tests],
    }


def _write_next(result: TaskResult) -> dict[str, str] | None:
    """Name what a TODO lacks: a function of this task, or of an earlier one that it needs."""
    missing = result.verdict.missing
    return missing and {"task": missing[0], "function": missing[1]}


def _test(result: TestResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "world": result.world,
        "outcome": result.verdict.outcome.value,
        "kind": result.verdict.kind,
        "world_size": result.world_size,
        "message": result.verdict.message,
        "details": result.verdict.details,
        "output": table.tail(result.verdict.output),
        "seconds": round(result.seconds, 3),
    }
