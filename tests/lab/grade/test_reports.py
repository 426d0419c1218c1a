"""Exact reports of small results, and reports of output that no format can hold."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab import course
from distlab.grade import report_paths, reports
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.results import GradeResult, TaskResult, TestResult

TASKS = course.load(Path(__file__).parents[3])
UNPRINTABLE = "\x00\x1b[31m ``` </failure> ]]> \ud800 \ufffe"
GRADESCOPE_TOP = {"score", "execution_time", "output", "stdout_visibility", "tests"}
GRADESCOPE_TEST = {"name", "number", "score", "max_score", "status", "output", "visibility"}


def a_task(task_id: str, verdict: Verdict) -> TaskResult:
    task = replace(TASKS.task(task_id), points=4)
    tests = [TestResult("test_it[sim]", "sim", verdict, 0.25, 4)]
    return TaskResult(task, f"{task_id}.py", "ab12", expected=1, tests=tests)


def a_result(verdict: Verdict) -> GradeResult:
    """Return results in which Task 1.3 has passed and Task 1.4 has this verdict."""
    tasks = [a_task("1.3", Verdict(Outcome.PASSED)), a_task("1.4", verdict)]
    return GradeResult("here", tasks, 1.5, {"python": "3.11"}, {"phase1/a.py": "ab12"}, 7)


HANG = Verdict(Outcome.HANG, "rank 1 waits", "  a.py:3  dist.recv(x)", "hello\n", kind="all wait")
HANGS = "Task 1.4: rank 1 waits. guidelines.md 1.4"


def written(kind: str, verdict: Verdict) -> Any:
    text = reports.FORMATS[kind](a_result(verdict))
    text.encode()  # raises an error if the text cannot be written to a file
    return json.loads(text) if kind in ("json", "gradescope") else text


def test_json_holds_everything() -> None:
    found = written("json", HANG)
    assert found["advice"][:2] == [HANGS, "    a.py:3  dist.recv(x)"]
    assert {key: found[key] for key in found if key not in ("tasks", "advice")} == {
        "schema": "distlab/grade/1",
        "submission": "here",
        "points": 4,
        "max_points": 8,
        "seconds": 1.5,
        "versions": {"python": "3.11"},
        "seed": 7,
        "files": {"phase1/a.py": "ab12"},
    }
    assert found["tasks"][0]["message"] == ""
    assert found["tasks"][1] == {
        "id": "1.4",
        "function": "broadcast",
        "outcome": "hang",
        "kind": "all wait",
        "world_size": 4,
        "fix_first": None,
        "lent": [],
        "write_next": None,
        "message": HANGS,
        "points": 0,
        "max_points": 4,
        "parts": {"a": 0},
        "is_part": False,
        "seconds": 0.25,
        "file": "1.4.py",
        "sha256": "ab12",
        "tests_expected": 1,
        "tests_expected_in_parts": {},
        "tests": [
            {
                "name": "test_it[sim]",
                "part": "a",
                "world": "sim",
                "outcome": "hang",
                "kind": "all wait",
                "world_size": 4,
                "message": "rank 1 waits",
                "details": "  a.py:3  dist.recv(x)",
                "output": "hello",
                "seconds": 0.25,
            }
        ],
    }


def test_gradescope_has_the_fields_that_its_documentation_names() -> None:
    found = written("gradescope", HANG)
    assert set(found) == GRADESCOPE_TOP
    assert (found["score"], found["execution_time"]) == (4, 2)
    assert all(set(test) == GRADESCOPE_TEST for test in found["tests"])
    assert [test["status"] for test in found["tests"]] == ["passed", "failed"]
    assert found["tests"][1]["output"] == f"a.py:3\n{HANGS}\n  a.py:3  dist.recv(x)"


def test_gradescope_shows_a_grader_error_to_instructors_alone() -> None:
    found = written("gradescope", Verdict(Outcome.GRADER_ERROR, "KeyError: 3", "Traceback"))
    _, shown, hidden = found["tests"]
    assert "tell your instructor" in shown["output"]
    assert (shown["score"], shown["visibility"]) == (0, "visible")
    assert (hidden["visibility"], "KeyError: 3" in hidden["output"]) == ("hidden", True)
    assert "KeyError" not in shown["output"]


@pytest.mark.parametrize(
    ("outcome", "element", "count"),
    [
        (Outcome.FAILED, "failure", "failures"),
        (Outcome.HANG, "failure", "failures"),
        (Outcome.IMPORT_ERROR, "error", "errors"),
        (Outcome.GRADER_ERROR, "error", "errors"),
        (Outcome.TODO, "skipped", "skipped"),
    ],
)
def test_junit_counts_by_kind(outcome: Outcome, element: str, count: str) -> None:
    passed, other = ET.fromstring(written("junit", Verdict(outcome, "why", "more")))
    assert (passed.get("name"), passed.get("tests"), passed.get(count)) == (
        "1.3 exchange",
        "1",
        "0",
    )
    found = other.find(f"testcase/{element}")
    assert found is not None
    assert (other.get(count), found.get("message"), found.text) == ("1", "why", "more")


@pytest.mark.parametrize("kind", reports.FORMATS)
def test_what_a_learner_prints_breaks_no_report(kind: str, tmp_path: Path) -> None:
    result = a_result(Verdict(Outcome.CRASH, UNPRINTABLE, UNPRINTABLE))
    reports.write(result, [(kind, tmp_path / "report")])
    text = (tmp_path / "report").read_text(encoding="utf-8")
    if kind == "junit":
        ET.fromstring(text)
    elif kind == "markdown":
        assert text.count("```") == 2
    else:
        json.loads(text)


@pytest.mark.parametrize("option", ["html=x", "json", "json="])
def test_a_report_without_format_or_path_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="FORMAT=PATH"):
        report_paths.parse([option])


def test_a_report_that_is_read_again_has_the_same_verdicts() -> None:
    missing = ("1.3", "exchange")
    verdicts = (
        Verdict(Outcome.TODO, "Task 1.3: exchange, see …", "a\nb", "hello\n", missing=missing),
        Verdict(Outcome.PASSED),
        HANG,
    )
    tasks = [
        TaskResult(TASKS.task(id), "a.py", "ab", 1, tests=[TestResult("a", "sim", verdict, 0.25)])
        for id, verdict in zip(("1.4", "1.6", "1.7"), verdicts, strict=True)
    ]
    tasks[0].lent, tasks[1].is_part = (TASKS.task("1.3"),), True
    not_run = TaskResult(TASKS.task("1.8"), "", "", expected=3)
    result = GradeResult("here", [*tasks, not_run], 1.5)
    text = reports.FORMATS["json"](result)
    again = GradeResult.from_json(json.loads(text), TASKS)
    assert reports.FORMATS["json"](again) == text
    assert again.tasks[0].is_waiting
    assert again.tasks[1].points == 0


@pytest.mark.parametrize("spoilt", [{}, {"tasks": []}, {"tasks": [{"id": "9.9"}]}])
def test_what_is_not_a_report_is_refused(spoilt: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        GradeResult.from_json(spoilt, TASKS)


# The Gradescope page is all that students see, so it begins with the line of their code.

TRACEBACK = """Traceback (most recent call last):
  File "/hand_in/phase1_data_parallel/trainer.py", line 59, in broadcast_parameters
    broadcast(x)
  File "/hand_in/phase1_data_parallel/collectives.py", line 36, in broadcast
    y = x.missing
AttributeError: 'Tensor' object has no attribute 'missing'"""
WAITS = """  rank 0  send to rank 1, () float32  collectives.py:36 in exchange
  rank 1  send to rank 0, () float32  collectives.py:48 in exchange
None of them can go first."""
LOOP = "  collectives.py:101  while True:"


def shown(verdict: Verdict) -> list[str]:
    """Return the lines that Gradescope shows for Task 1.4 with this verdict."""
    return str(written("gradescope", verdict)["tests"][1]["output"]).splitlines()


@pytest.mark.parametrize(
    ("outcome", "details", "place"),
    [
        (Outcome.FAILED, TRACEBACK, "collectives.py:36"),
        (Outcome.HANG, WAITS, "collectives.py:36"),
        (Outcome.HANG, LOOP, "collectives.py:101"),
    ],
)
def test_the_line_comes_first_then_the_message_then_all_that_is_known(
    outcome: Outcome, details: str, place: str
) -> None:
    first, message, *rest = shown(Verdict(outcome, "Why.", details))
    assert first == place
    assert message.startswith("Task 1.4: Why.")
    assert rest == details.splitlines()
