"""course.toml lists the tasks that each solution calls, and verdicts make use of that list."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from distlab.course import Task, load
from distlab.grade import table
from distlab.grade.outcomes import Outcome, Verdict
from distlab.grade.results import GradeResult, TaskResult, TestResult
from distlab.learner import grading, state, status
from distlab.learner.folder import CourseFolder
from distlab.learner.source import defined

ROOT = Path(__file__).parents[2]
COURSE = load(ROOT)
OWNERS = {(task.folder, name): task for task in COURSE.tasks for name in task.functions}
OWNERS |= {  # a method's class belongs to the same task
    (folder, name.partition(".")[0]): task for (folder, name), task in OWNERS.items()
}


@cache
def functions_of(path: Path) -> dict[str, ast.AST]:
    """Return the functions, methods and top-level classes of a file, by name."""
    tree = ast.parse((ROOT / path).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return classes | dict(defined(tree))


def names_in(node: ast.AST, holder: str) -> Iterator[str]:
    """Yield the names that code uses, except in annotations."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute) and holder:
        yield f"{holder}.{node.attr}"
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from names_in(child, holder)


def called_by(task: Task) -> set[str]:
    """Return the ids of the tasks whose functions a solution calls, directly or through helpers."""
    nodes = functions_of(task.solution)
    inits = {f"{name.partition('.')[0]}.__init__" for name in task.functions if "." in name}
    reached = [*task.functions, *(inits & nodes.keys())]
    found = {
        owner.id
        for name in task.functions
        for base in getattr(nodes.get(name.partition(".")[0]), "bases", [])
        if (owner := OWNERS.get((task.folder, ast.unparse(base)), task)) != task
    }
    for name in reached:  # the list grows during the loop
        for other in names_in(nodes[name], name.rpartition(".")[0]):
            # A name without an owner belongs to a helper, to given code, or to torch.
            owner = OWNERS.get((task.folder, other), task)
            if owner != task:
                found.add(owner.id)
            elif other in nodes and other not in reached:
                reached.append(other)
    return found


@pytest.mark.parametrize("task", COURSE.tasks, ids=lambda task: task.id)
def test_a_task_builds_on_those_that_its_solution_calls(task: Task) -> None:
    assert set(task.uses) == called_by(task)


def test_what_it_builds_on_includes_what_that_builds_on() -> None:
    assert [t.id for t in COURSE.builds_on(COURSE.task("1.8"))] == ["1.3", "1.4", "1.6"]
    assert COURSE.builds_on(COURSE.task("1.3")) == ()


def graded(**outcomes: Outcome) -> GradeResult:
    """Return grading results with one test per task; ``t1_3`` names task 1.3."""
    tasks = []
    for name, outcome in outcomes.items():
        task = COURSE.task(name[1:].replace("_", "."))
        test = TestResult("test_it", "sim", Verdict(outcome, f"{task.function} is wrong."), 0.1)
        tasks.append(TaskResult(task, "file.py", "", expected=1, tests=[test]))
    return GradeResult("here", tasks, 1.0)


def test_failures_of_one_cause_say_what_to_fix_first() -> None:
    wrong = Outcome.FAILED
    result = graded(t1_3=wrong, t1_4=wrong, t1_7=Outcome.HANG, t1_8=wrong)
    lines = list(table.failures(result, verbose=False))
    assert "Task 1.3: exchange is wrong. guidelines.md 1.3" in lines
    assert "Task 1.4: broadcast is wrong. guidelines.md 1.4" in lines, "it builds on nothing"
    assert "Task 1.7 builds on exchange: fix 1.3 first." in lines
    assert "Task 1.8 builds on exchange: fix 1.3 first." in lines
    ends = [line.rpartition("0.1")[2].strip() for line in list(table.rows(result))[1:-1]]
    assert ends == ["", "", "fix 1.3 first", "fix 1.3 first"]
    assert "Task 1.8: measure_all_reduce is wrong" in "\n".join(
        table.failures(result, verbose=True)
    )


def test_what_is_to_be_written_or_has_passed_is_no_cause() -> None:
    result = graded(t1_3=Outcome.TODO, t1_7=Outcome.FAILED)
    assert result.cause(result.tasks[1]) is None
    result = graded(t1_3=Outcome.FAILED, t1_7=Outcome.PASSED)
    assert result.cause(result.tasks[1]) is None


def test_a_check_of_one_task_knows_of_the_failure_that_it_builds_on(tmp_path: Path) -> None:
    here = CourseFolder(tmp_path, COURSE)
    task = COURSE.task("1.8")
    state.remember(here, {"1.3": state.Record("hang"), "1.6": state.Record("failed")})
    failed = grading.Grading(1, graded(t1_8=Outcome.FAILED))
    lines = list(status.fix_first(here, task, failed, state.load(here)))
    assert lines == ["1.8 builds on exchange, which fails too. Fix 1.3 first: distlab check 1.3"]
    edited = state.Record("hang", digest="of another file")
    state.remember(here, {"1.3": edited})
    lines = list(status.fix_first(here, task, failed, state.load(here)))
    assert lines == [
        "1.8 builds on exchange, which failed and was edited since. Grade 1.3 again: "
        "distlab check 1.3"
    ]
    passed = grading.Grading(0, graded(t1_8=Outcome.PASSED))
    assert list(status.fix_first(here, task, passed, state.load(here))) == []
