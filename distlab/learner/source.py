"""The functions of a task in a file: their names and places, and whether they are written.

The functions of a task are those that course.toml lists: 1.8 also has ``fit_alpha_beta``. Files are
read as Python reads them, in the encoding that they declare.
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
# Errors of decoding a file, and of Python's parser.
UNREADABLE = (SyntaxError, UnicodeError, LookupError)
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def read(path: Path) -> str:
    """Return the text of a Python file, "" if Python could not read it."""
    try:
        text, _ = decoded(files.read_regular(path, files.MAX_SOURCE_BYTES))
    except (OSError, *UNREADABLE):
        return ""
    return io.StringIO(text, newline=None).read()  # \n ends every line


def decoded(data: bytes) -> tuple[str, str]:
    """Return the text, all line ends as they are, and the encoding, as Python finds it.

    Raises:
        SyntaxError, UnicodeError, LookupError: Python's own errors; ``UNREADABLE`` is all three.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a file, None if it does not parse; warnings are ignored."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except UNPARSABLE:
        return None


def functions(text: str) -> dict[str, str]:
    """Return the source of all functions and methods by name; none if the file does not parse."""
    tree, lines = parse(text), split(text)
    return {name: "".join(lines[span(node)]) for name, node in defined(tree)} if tree else {}


def split(text: str) -> list[str]:
    """Split into lines, with ends, like Python's parser, which does not split at form feeds."""
    return list(io.StringIO(text, newline=""))


def defined(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods by name, as ``Trainer.fit``; not those inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from defined(node, f"{prefix}{node.name}.")


def span(node: Function) -> slice:
    """Return the lines of a function, its decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def to_write(task: Task, template: str) -> dict[str, str]:
    """Return the functions of a template that are a TODO of ``task``, by name."""
    mark = re.compile(rf"NotImplementedError\(\s*[\"']Task {re.escape(task.id)}:")
    return {name: source for name, source in functions(template).items() if mark.search(source)}


def is_to_write(folder: CourseFolder, task: Task) -> bool:
    """Return True if the main function of a task is still a TODO in the learner's file."""
    return task.function in to_write(task, read(folder.root / task.template))


def digest(folder: CourseFolder, task: Task) -> str:
    """Return a digest of the task's functions in the learner's file, "" if none is there.

    It also covers the rest of the file, such as helpers, without comments and other tasks.
    """
    listed = (other for other in folder.course.tasks if other.template == task.template)
    names = frozenset(name for other in listed for name in other.functions)
    sources, shared = _apart(read(folder.root / task.template), names)
    code = "".join(sources.get(name, "") for name in task.functions)
    return hashlib.sha256(f"{code}{shared}".encode()).hexdigest()[:16] if code else ""


@lru_cache(maxsize=64)  # a verdict needs the digests of all tasks; a file has several tasks
def _apart(text: str, names: frozenset[str]) -> tuple[Mapping[str, str], str]:
    """Return the functions of a file by name, and the file without the functions in ``names``."""
    return functions(text), _without(text, names)


def _without(text: str, names: Container[str]) -> str:
    """Return a dump of a file's tree without these functions, or the text of a too deep one."""
    tree = parse(text) or ast.Module([], [])
    left_out = {node for name, node in defined(tree) if name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body = [entry for entry in node.body if entry not in left_out]
    try:
        return ast.dump(tree)
    except RecursionError:
        return text
