"""Judge a task's functions as they stand in a cell, and save them into the template.

%%check 3.3     the cell's functions are judged as if the template had them
%save 3.3       they are written into it, and the old file is kept, as `distlab reset` does
"""

import ast
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distlab.course import Task
from distlab.learner import grading, source, state, status, templates
from distlab.learner.folder import CourseFolder, LearnerError


def spliced(folder: CourseFolder, task: Task, cell: str) -> bytes:
    """Return the learner's file with a cell's functions in it, and with its helpers before them.

    Raises:
        LearnerError: The cell defines none of the task's functions, or the file cannot take them.
    """
    written = {
        name: text for name, text in source.functions(cell).items() if name in task.functions
    }
    if not written:
        names = " and ".join(task.functions)
        raise LearnerError(f"the cell does not define {names}, which {task.id} is about")
    text, encoding = source.decoded(templates.contents(folder, task))
    after = templates.spliced(_with_helpers(text, _helpers(cell, written.keys()), task), written)
    if source.parse(after) is None:
        raise LearnerError(f"{task.template} would not be Python with this cell in it")
    return after.encode(encoding, errors="backslashreplace")


def _helpers(cell: str, names: object) -> str:
    """Return the statements of a cell that are none of these functions, nor classes around them."""
    tree, lines = ast.parse(cell), source.split(cell)
    wanted = {str(name).partition(".")[0] for name in names}  # type: ignore[attr-defined]
    others = [node for node in tree.body if getattr(node, "name", "") not in wanted]
    return "\n".join("".join(lines[_start(node) : node.end_lineno]).rstrip() for node in others)


def _start(node: ast.stmt) -> int:
    return source.span(node).start if isinstance(node, source.Function) else node.lineno - 1


def _with_helpers(text: str, helpers: str, task: Task) -> str:
    """Put helpers before the first function or class of a task."""
    tree, lines = source.parse(text), source.split(text)
    names = {name.partition(".")[0] for name in task.functions}
    places = [_start(node) for node in (tree.body if tree else ()) if _name(node) in names]
    if not helpers or not places:
        return text
    lines.insert(min(places), f"{helpers}\n\n\n")
    return "".join(lines)


def _name(node: ast.stmt) -> str:
    name: str = getattr(node, "name", "")
    return name


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
