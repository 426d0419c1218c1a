"""Machine-readable reports, all made from one ``GradeResult``.

json         the complete result of a run, for other programs
junit        XML that every CI system reads, with a test suite per task
gradescope   ``results.json``, with a visible test per task, whose output begins with the learner's
             line; an error of the grader itself is in a test that only instructors see
markdown     a summary for the page of a CI run
"""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

from distlab.grade import report_paths, table
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.results import GradeResult, TaskResult, TestResult

SCHEMA = "distlab/grade/1"


def write(result: GradeResult, chosen: Sequence[tuple[str, Path]]) -> None:
    """Write every requested report.

    Raises:
        OSError: A report cannot be written; the others are still written.
    """
    problem: OSError | None = None
    for name, path in chosen:
        try:
            report_paths.write(path, FORMATS[name](result))
        except OSError as error:
            problem = error
    if problem:
        raise problem


def _json(result: GradeResult) -> str:
    """Return the results as JSON, with the messages that the terminal shows."""
    report = {
        "schema": SCHEMA,
        **result.to_json(),
        "advice": list(table.failures(result, verbose=False)),
        "tasks": [_entry(task, result) for task in result.tasks],
    }
    return json.dumps(report, indent=2) + "\n"


def _entry(task: TaskResult, result: GradeResult) -> dict[str, Any]:
    entry, cause = task.to_json(), result.cause(task)
    tests = entry.pop("tests")
    words = {"fix_first": cause.id if cause else None, "message": table.message(task)}
    return {**entry, **words, "tests": tests}


# JUnit

# JUnit calls a wrong submission a failure, and a test that reaches no verdict an error.
_ELEMENTS = {
    Outcome.TODO: "skipped",
    **dict.fromkeys((Outcome.FAILED, Outcome.HANG, Outcome.CRASH, Outcome.OOM), "failure"),
    **dict.fromkeys((Outcome.IMPORT_ERROR, Outcome.NOT_RUN, Outcome.GRADER_ERROR), "error"),
}


def _junit(result: GradeResult) -> str:
    suites = ET.Element("testsuites", name="distlab", time=f"{result.seconds:.3f}")
    suites.extend(map(_suite, result.tasks))
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(result: TaskResult) -> ET.Element:
    tests = [*result.tests, *_missing(result)]
    kinds = [_ELEMENTS.get(test.verdict.outcome) for test in tests]
    suite = ET.Element(
        "testsuite",
        name=f"{result.task.id} {result.task.label}",
        tests=str(len(tests)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        skipped=str(kinds.count("skipped")),
        time=f"{result.seconds:.3f}",
    )
    if result.lent:
        properties = ET.SubElement(suite, "properties")
        ET.SubElement(properties, "property", name="lent", value=table.lent(result))
    suite.extend(_case(result, test) for test in tests)
    return suite


def _missing(result: TaskResult) -> list[TestResult]:
    """Return an entry for tests that were not run; without it, the task would seem to pass."""
    if result.is_complete:
        return []
    verdict = result.verdict if not result.tests else Verdict(Outcome.NOT_RUN, table.INCOMPLETE)
    return [TestResult("all tests of the task", "", verdict, 0.0)]


def _case(task: TaskResult, test: TestResult) -> ET.Element:
    case = ET.Element(
        "testcase", classname=f"task {task.task.id}", name=test.name, time=f"{test.seconds:.3f}"
    )
    kind = _ELEMENTS.get(test.verdict.outcome)
    if kind:
        element = ET.SubElement(case, kind, message=_printable(test.verdict.message))
        element.text = _printable(test.verdict.details)
    return case


def _printable(text: str) -> str:
    """Remove characters that XML does not allow, because a learner's output may contain them."""
    return "".join(
        c for c in text if c in "\t\n" or " " <= c < "\ud800" or "\ue000" <= c <= "\ufffd"
    )


# Gradescope

_CALLED = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_WAITS = re.compile(r"(\S+\.py):(\d+)\b")


def _gradescope(result: GradeResult) -> str:
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
    loan = f"This task was {table.lent(result)}." if result.lent else ""
    return {
        "number": result.task.id,
        "name": f"{result.task.id} {result.task.label}",
        "score": result.points,
        "max_score": result.task.points,
        "status": "passed" if result.has_passed else "failed",
        "output": "\n".join(filter(None, ["" if result.has_passed else _output(result), loan])),
        "visibility": "visible",
    }


def _output(result: TaskResult) -> str:
    if result.outcome is Outcome.GRADER_ERROR:
        return "The grader failed on this task: tell your instructor."
    details = result.verdict.details.splitlines()[-table.DETAILS :]
    return "\n".join(filter(None, [_place(result), table.message(result), *details]))


def _place(result: TaskResult) -> str:
    """Return the learner's decisive line, such as ``collectives.py:36``; "" if none is known.

    This is the innermost line of a traceback, or the first one in a table of waiting ranks.
    """
    details = result.verdict.details
    places = _CALLED.findall(details)[-1:] or _WAITS.findall(details)[:1]
    return "".join(f"{PurePath(file).name}:{line}" for file, line in places)


def _hidden(result: TaskResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "name": f"{result.task.id} grader error",
        "status": "failed",
        "output": f"{verdict.message}\n{verdict.details}",
        "visibility": "hidden",
    }


# Markdown


def _markdown(result: GradeResult) -> str:
    lines = [
        f"## {result.points} of {result.max_points} points",
        "",
        "| task | function | outcome | points | seconds |",
        "|---|---|---|---:|---:|",
        *map(_row, result.tasks),
    ]
    for task in table.wrong(result):
        text = table.message(task).replace("```", "'''")
        lines += ["", f"**{task.task.id} {task.task.label}**", "", "```", text, "```"]
    return "\n".join(lines) + "\n"


def _row(result: TaskResult) -> str:
    points = f"{result.points}/{result.task.points}"
    outcome = ", ".join(filter(None, [result.outcome_name, table.lent(result)]))
    return (
        f"| {result.task.id} | `{result.task.label}` | {outcome} | {points} "
        f"| {result.seconds:.1f} |"
    )


FORMATS: dict[str, Callable[[GradeResult], str]] = {
    "json": _json,
    "junit": _junit,
    "gradescope": _gradescope,
    "markdown": _markdown,
}
