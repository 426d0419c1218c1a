"""Gradescope's ``results.json``: a visible test per task, with the learner's line on top.

If the grader itself fails, students see that, and the score of the task is 0; the error is in a
test that only instructors see.
"""

import json
import re
from pathlib import PurePath
from typing import Any

from distlab.grade import table
from distlab.grade.outcomes import Outcome
from distlab.grade.results import GradeResult, TaskResult

_CALLED = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_WAITS = re.compile(r"(\S+\.py):(\d+)\b")


def text(result: GradeResult) -> str:
    """Return the report."""
    tests = [_test(task) for task in result.tasks]
    tests += [_hidden(task) for task in result.tasks if task.outcome is Outcome.GRADER_ERROR]
    report = {
        "score": result.points,
        "execution_time": round(result.seconds),
        "output": f"{result.points} of {result.max_points} points",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    return json.dumps(report, indent=2) + "\n"


def _test(result: TaskResult) -> dict[str, Any]:
    has_passed = result.points == result.task.points
    return {
        "number": result.task.id,
        "name": f"{result.task.id} {result.task.label}",
        "score": result.points,
        "max_score": result.task.points,
        "status": "passed" if has_passed else "failed",
        "output": "\n".join(filter(None, ["" if has_passed else _output(result), _loan(result)])),
        "visibility": "visible",
    }


def _loan(result: TaskResult) -> str:
    return f"This task was {table.lent(result)}." if result.lent else ""


def _output(result: TaskResult) -> str:
    if result.outcome is Outcome.GRADER_ERROR:
        return "The grader failed on this task: tell your instructor."
    details = result.verdict.details.splitlines()[-table.DETAILS :]
    return "\n".join(filter(None, [_place(result), table.message(result), *details]))


def _place(result: TaskResult) -> str:
    """Return the learner's decisive line, such as ``collectives.py:36``, "" if none is known.

    This is the innermost line of a traceback, or the first one in a table of waiting ranks.
    """
    details = result.verdict.details
    called = _CALLED.findall(details)
    places = called[-1:] or _WAITS.findall(details)[:1]
    return "".join(f"{PurePath(file).name}:{line}" for file, line in places)


def _hidden(result: TaskResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "name": f"{result.task.id} grader error",
        "status": "failed",
        "output": f"{verdict.message}\n{verdict.details}",
        "visibility": "hidden",
    }
