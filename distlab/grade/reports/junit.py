"""JUnit XML, which every CI system reads: a test suite per task."""

import xml.etree.ElementTree as ET

from distlab.grade import table
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.results import GradeResult, TaskResult, TestResult

# A wrong submission is a failure; a test without a verdict on the submission is an error.
_ELEMENTS = {
    Outcome.TODO: "skipped",
    Outcome.FAILED: "failure",
    Outcome.HANG: "failure",
    Outcome.CRASH: "failure",
    Outcome.OOM: "failure",
    Outcome.IMPORT_ERROR: "error",
    Outcome.NOT_RUN: "error",
    Outcome.GRADER_ERROR: "error",
}


def text(result: GradeResult) -> str:
    """Return the report."""
    suites = ET.Element("testsuites", name="distlab", time=f"{result.seconds:.3f}")
    for task in result.tasks:
        suites.append(_suite(task))
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
    """Return a case for tests that were not run; without it, an unscored task would be green."""
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
    """Remove characters that XML does not allow; a learner's output may contain any."""
    return "".join(
        c for c in text if c in "\t\n" or " " <= c < "\ud800" or "\ue000" <= c <= "\ufffd"
    )
