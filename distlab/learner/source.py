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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

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

    The digest also covers what these functions use in the file, directly or through one another:
    helpers, constants and imports, and for a method its class. It covers neither the functions of
    other tasks nor comments outside the task's functions.
    """
    listed = (other for other in folder.course.tasks if other.template == task.template)
    names = frozenset(name for other in listed for name in other.functions)
    written, shared = _apart(read(folder.root / task.template), names)
    own = [written[name] for name in task.functions if name in written]
    if not own:
        return ""
    code = "".join(part.code for part in [*own, *_used(own, shared)])
    return hashlib.sha256(code.encode()).hexdigest()[:16]


class Part(NamedTuple):
    """A part of a file and the names that it mentions."""

    code: str
    mentions: Set[str]


_ANY = "*"  # name of what may concern every function
Parts = Mapping[str, Sequence[Part]]  # by the names that they define


def _used(own: Iterable[Part], shared: Parts) -> list[Part]:
    """Return the parts that define what these parts mention, directly or through one another."""
    used = set[str]()
    new = {_ANY, *(name for part in own for name in part.mentions)}
    while new:
        used |= new
        parts = [part for name in new for part in shared.get(name, ())]
        new = {name for part in parts for name in part.mentions} - used
    return [part for name in sorted(used) for part in shared.get(name, ())]


@lru_cache(maxsize=64)  # a verdict needs the digests of all tasks, and tasks share files
def _apart(text: str, names: frozenset[str]) -> tuple[Mapping[str, Part], Parts]:
    """Return those functions of a file that are in ``names``, and the rest of the file."""
    tree, lines = parse(text) or ast.Module([], []), split(text)
    listed = {name: node for name, node in defined(tree) if name in names}
    written = {
        name: Part("".join(lines[span(node)]), {*_mentioned(node), name.partition(".")[0]})
        for name, node in listed.items()
    }
    left_out = {*listed.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body = [entry for entry in node.body if entry not in left_out]
    shared: dict[str, list[Part]] = {}
    for entry in chain.from_iterable(map(_one_by_one, tree.body)):
        part = Part(_dump(entry, lines), _mentioned(entry))
        for name in _defined_by(entry) or part.mentions:
            shared.setdefault(name, []).append(part)
    return written, shared


def _one_by_one(entry: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement; an import of several names as one import per name."""
    if isinstance(entry, ast.Import | ast.ImportFrom):
        for alias in entry.names:
            yield type(entry)(**{**vars(entry), "names": [alias]})
    else:
        yield entry


def _defined_by(entry: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(entry, Function | ast.ClassDef):
        return {entry.name}
    if isinstance(entry, ast.Expr):  # torch.manual_seed(0)
        return {_ANY}
    names = set[str]()
    for node in ast.walk(entry):
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            name = node.asname or node.name.partition(".")[0]
            names.add(_ANY if name == "*" else name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _mentioned(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _dump(entry: ast.stmt, lines: Sequence[str]) -> str:
    """Return a dump of a statement; its source if it is nested too deeply."""
    try:
        return ast.dump(entry)
    except RecursionError:
        return "".join(lines[entry.lineno - 1 : entry.end_lineno])
