"""Compare a learner's functions with the solution's, including the solution's helpers."""

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence

from distlab.course import Task
from distlab.learner import source
from distlab.learner.folder import CourseFolder, LearnerError
from distlab.learner.source import Function


def diff(folder: CourseFolder, task: Task) -> str:
    """Return a unified diff of the learner's code and the solution's; "" if they are the same.

    The diff covers the task's functions and the private functions that the solution calls.
    Docstrings are left out.

    Raises:
        LearnerError: There is no solution, or the learner's file does not parse.
    """
    if not folder.has_solution(task):
        raise LearnerError("this copy of the course comes without solutions/ to compare with")
    own_text = source.read(folder.root / task.template)
    solved_text = source.read(folder.root / task.solution)
    own_functions, solved_functions = _bare(own_text), _bare(solved_text)
    if task.function not in solved_functions:
        raise LearnerError(f"{task.solution} has no {task.function} to compare with")
    if not own_functions:
        raise LearnerError(f"{task.template} is missing or does not parse: distlab check {task.id}")
    names = [*task.functions, *_helpers(solved_text, task.functions)]
    return "".join(
        _diff(name, own_functions.get(name, ""), solved_functions.get(name, "")) for name in names
    )


def _bare(text: str) -> dict[str, str]:
    """Return the source of all functions by name, without docstrings."""
    lines = source.split(text)
    return {name: "".join(_bare_lines(node, lines)) for name, node in _nodes(text).items()}


def _nodes(text: str) -> dict[str, Function]:
    tree = source.parse(text)
    return dict(source.defined(tree)) if tree else {}


def _bare_lines(node: Function, lines: Sequence[str]) -> Iterator[str]:
    dropped: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, Function) and ast.get_docstring(inner) is not None and inner.body[1:]:
            text = inner.body[0]
            dropped.update(range(text.lineno - 1, text.end_lineno or text.lineno))
    whole = source.span(node)
    yield from (lines[k] for k in range(whole.start, whole.stop) if k not in dropped)


def _helpers(text: str, names: Sequence[str]) -> list[str]:
    """Return the names of private functions that the named functions use, even indirectly."""
    nodes = _nodes(text)
    used = list(names)
    for name in used:  # the list grows during the loop
        used += [other for other in dict.fromkeys(_uses(name, nodes)) if other not in used]
    return used[len(names) :]


def _uses(name: str, nodes: Mapping[str, Function]) -> Iterator[str]:
    holder = name.rpartition(".")[0]
    for entry in ast.walk(nodes[name]):
        other = ""
        if isinstance(entry, ast.Name):
            other = entry.id
        elif isinstance(entry, ast.Attribute) and isinstance(entry.value, ast.Name):
            other = f"{holder}.{entry.attr}" if entry.value.id == "self" else ""
        if other in nodes and other.rpartition(".")[2].startswith("_"):
            yield other


def _diff(name: str, yours: str, solved: str) -> str:
    lines = difflib.unified_diff(
        yours.splitlines(keepends=True),
        solved.splitlines(keepends=True),
        f"yours: {name}",
        f"solution: {name}",
        n=100,
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
