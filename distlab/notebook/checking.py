"""Judge a task's functions as they stand in a cell, and save them into the template.

%%check 3.3     the cell's functions are judged as if the template had them
%save 3.3       they are written into it, and the old file is kept, as `distlab reset` does
"""

import ast
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from distlab.course import Task
from distlab.learner import grading, source, state, status, templates
from distlab.learner.folder import CourseFolder, LearnerError

DEFINITIONS = ast.Import | ast.ImportFrom | source.Function | ast.ClassDef
CONSTANTS = ast.Assign | ast.AnnAssign


def spliced(folder: CourseFolder, task: Task, cell: str) -> bytes:
    """Return the learner's file with a cell's functions in it, and with its helpers before them.

    Raises:
        LearnerError: The cell defines none of the task's functions, or the file cannot take them.
    """
    functions = source.functions(cell)
    if functions.keys().isdisjoint(task.functions):
        names = " and ".join(task.functions)
        raise LearnerError(f"the cell does not define {names}, which {task.id} is about")
    text, encoding = source.decoded(templates.contents(folder, task))
    replaced = {name: functions[name] for name in source.functions(text) if name in functions}
    helpers = [
        code for code in _helpers(cell, task, replaced) if f"\n{code}\n" not in f"\n{text}\n"
    ]
    after = templates.spliced(_with_helpers(text, "\n".join(helpers), task), replaced)
    if source.parse(after) is None:
        raise LearnerError(f"{task.template} would not be Python with this cell in it")
    return after.encode(encoding, errors="backslashreplace")


def _helpers(cell: str, task: Task, replaced: Iterable[str]) -> Iterator[str]:
    """Yield what a cell imports and defines besides the replaced functions, and its constants.

    What comes after the task's functions is trials, which the template does not need.
    """
    tree, lines = ast.parse(cell), source.split(cell)
    own, present = _outer(task.functions), _outer(replaced)
    end = max(node.lineno for node in tree.body if _name(node) in own)
    for node in tree.body:
        is_helper = isinstance(node, DEFINITIONS) and _name(node) not in own | present
        if is_helper or (isinstance(node, CONSTANTS) and node.lineno < end):
            yield "".join(lines[_start(node) : node.end_lineno]).rstrip()


def _outer(functions: Iterable[str]) -> set[str]:
    """Return the names of functions, and of the classes of methods."""
    return {name.partition(".")[0] for name in functions}


def _name(node: ast.stmt) -> str:
    name: str = getattr(node, "name", "")
    return name


def _start(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def _with_helpers(text: str, helpers: str, task: Task) -> str:
    """Put helpers before the first function or class of a task."""
    tree, lines = source.parse(text), source.split(text)
    names = _outer(task.functions)
    places = [_start(node) for node in (tree.body if tree else ()) if _name(node) in names]
    if not helpers or not places:
        return text
    lines.insert(min(places), f"{helpers}\n\n\n")
    return "".join(lines)


def check(folder: CourseFolder, task: Task, cell: str) -> Iterator[str]:
    """Judge a cell's functions as the template's would be; yield the lines of the verdict."""
    after = spliced(folder, task, cell)
    with tempfile.TemporaryDirectory(prefix="distlab-") as parent:
        phase = Path(parent, task.folder)
        shutil.copytree(folder.root / task.folder, phase, ignore=shutil.ignore_patterns("figures"))
        (Path(parent) / task.template).write_bytes(after)
        graded = grading.grade(folder, [*grading.for_task(folder, task), "--impl", parent])
    yield from map(status.verdict, graded.tasks.values())
    if graded.code == grading.FULL_MARKS:
        yield f"%save {task.id} writes it into {task.template}"
    else:
        yield from status.fix_first(folder, task, graded, state.load(folder))
        yield from status.explanation(folder, task, graded)


def save(folder: CourseFolder, task: Task, cell: str) -> str:
    """Write a cell's functions into the template; return a line on what was done."""
    before, after = templates.contents(folder, task), spliced(folder, task, cell)
    old = templates.reset(folder, task, templates.Plan(before, after, is_whole=False))
    return f"{task.template} now has {task.label} of the cell; the old file is {old}"
