"""A task's functions in a file: their names and positions, and whether they are written.

course.toml lists the functions of a task. Some tasks have several: task 1.8, for instance, also
has ``fit_alpha_beta``. Files are read as Python reads them, in the encoding that they declare.
"""

import ast
import hashlib
import io
import re
import tokenize
import warnings
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from distlab.course import Task
from distlab.learner.folder import CourseFolder
from distlab.util import files

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Errors that decoding a file can raise, and errors that parsing it can raise.
UNREADABLE = (SyntaxError, UnicodeError, LookupError)
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def read(path: Path) -> str:
    """Return the text of a Python file; "" if Python could not read it."""
    try:
        text, _ = decoded(files.read_regular(path, files.MAX_SOURCE_BYTES))
    except (OSError, *UNREADABLE):
        return ""
    return io.StringIO(text, newline=None).read()  # turns all line endings into \n


def decoded(data: bytes) -> tuple[str, str]:
    """Return a file's text, with line endings unchanged, and the encoding that Python detects.

    Raises:
        SyntaxError, UnicodeError, LookupError: Python's own errors; ``UNREADABLE`` holds all three.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a file, or None if it does not parse; ignore warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except UNPARSABLE:
        return None


def functions(text: str) -> dict[str, str]:
    """Return the source of all functions and methods by name; {} if the file does not parse."""
    tree, lines = parse(text), split(text)
    return {name: "".join(lines[span(node)]) for name, node in defined(tree)} if tree else {}


def split(text: str) -> list[str]:
    """Split a text into lines as Python's parser does (not at form feeds), keeping line endings."""
    return list(io.StringIO(text, newline=""))


def defined(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods (named as in ``Trainer.fit``), except those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from defined(node, f"{prefix}{node.name}.")


def span(node: Function) -> slice:
    """Return the lines of a function, including its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def to_write(task: Task, template: str) -> dict[str, str]:
    """Return, by name, the source of the template's functions that are still a TODO of ``task``."""
    mark = re.compile(rf"NotImplementedError\(\s*[\"']Task {re.escape(task.id)}:")
    return {name: source for name, source in functions(template).items() if mark.search(source)}


def is_to_write(folder: CourseFolder, task: Task) -> bool:
    """Return True if the main function of a task is still a TODO in the learner's file."""
    return task.function in to_write(task, read(folder.root / task.template))


def is_written(folder: CourseFolder, task: Task) -> bool:
    """Return True if no function of a task is still a TODO in the learner's file."""
    return not {*task.functions} & {*to_write(task, read(folder.root / task.template))}


def digest(folder: CourseFolder, task: Task) -> str:
    """Return a digest of the task's functions in the learner's file; "" if it has none of them.

    The digest also covers other code in the file, such as helpers, but neither its comments nor the
    functions of other tasks.
    """
    listed = (other for other in folder.course.tasks if other.template == task.template)
    names = frozenset(name for other in listed for name in other.functions)
    sources, shared = _apart(read(folder.root / task.template), names)
    code = "".join(sources.get(name, "") for name in task.functions)
    return hashlib.sha256(f"{code}{shared}".encode()).hexdigest()[:16] if code else ""


@lru_cache(maxsize=64)  # a verdict needs the digests of all tasks, and tasks share files
def _apart(text: str, names: frozenset[str]) -> tuple[Mapping[str, str], str]:
    """Return a file's functions by name, and a dump of the file without those in ``names``."""
    return functions(text), _without(text, names)


def _without(text: str, names: Container[str]) -> str:
    """Return a dump of a file's tree without these functions; the text if the tree is too deep."""
    tree = parse(text) or ast.Module([], [])
    left_out = {node for name, node in defined(tree) if name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body = [entry for entry in node.body if entry not in left_out]
    try:
        return ast.dump(tree)
    except RecursionError:
        return text
