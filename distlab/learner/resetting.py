"""Putting a task's functions back to their template, in a file that may be broken in any way.

find a place       by_syntax, where the file parses; else by_indent; else up_to_next_definition
put the template   in place of the first definition; further ones would undo it, and are removed
prove it           the new text compiles, and nothing else gives the function's name a meaning
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import strftime

from distlab.course import Task
from distlab.learner import templates
from distlab.learner.folder import CourseFolder, LearnerError, WriteError
from distlab.learner.source import (
    UNPARSABLE,
    UNREADABLE,
    Function,
    decoded,
    defined,
    parse,
    span,
    split,
)
from distlab.util import files

STARTS = re.compile(r"[\w@#]")  # a statement or a comment, but no closing bracket
DEFINES = re.compile(r"(async\s+def|def|class)\b|@")


@dataclass(frozen=True)
class Reset:
    """What a reset has done: where the old file is, and what it removed beside the functions."""

    old: Path
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A definition, lines ``first`` to ``end``, and what was pasted below it, up to ``stop``."""

    first: int
    end: int
    stop: int


def reset(folder: CourseFolder, task: Task) -> Reset:
    """Put the task's functions back to their template; keep a copy of the old file.

    All the rest stays as it is, byte for byte.

    Raises:
        LearnerError: there is no template, the file does not hold the functions, or would not be
            whole afterwards; nothing was changed.
        WriteError: the copy or the file cannot be written; the file was not changed.
    """
    path = folder.root / task.template
    given = templates.untouched(folder, task)
    before, after, removed = _put_back(path, task, given)
    old = folder.private / "reset" / task.id
    try:
        old = _next_copy(old, path.name)
        old.write_bytes(before)
        files.write_whole(path, after)
    except OSError as error:
        reason = f"{error.filename or old}: {error.strerror or error}"
        raise WriteError(f"nothing was changed: {reason}") from None
    return Reset(old, removed)


def _put_back(
    path: Path, task: Task, given: Mapping[str, str]
) -> tuple[bytes, bytes, tuple[str, ...]]:
    """Return the file, the file with the templates in it, and what else is not there any more."""
    before = _bytes(path)
    text, encoding = _decoded(before, task)
    problem = ""
    for find in (_by_syntax, _by_indent, _up_to_next_definition):
        found = {name: list(find(text, name)) for name in given}
        missing = [name for name, places in found.items() if not places]
        if missing:
            problem = problem or f"has no {missing[0]} to reset"
            continue
        after = _with_templates(text, given, found).encode(encoding, errors="backslashreplace")
        problem = _why_not(after, given)
        if not problem:
            return before, after, tuple(_removed(found))
    raise LearnerError(
        f"nothing was changed: {task.template} {problem}; git checkout -- {task.template} brings "
        "the whole file back"
    )


def _bytes(path: Path) -> bytes:
    try:
        return files.read_regular(path, files.MAX_SOURCE_BYTES)
    except OSError:
        return b""


def _decoded(data: bytes, task: Task) -> tuple[str, str]:
    try:
        return decoded(data)
    except UNREADABLE as error:
        raise LearnerError(
            f"nothing was changed: Python cannot read {task.template}: {error}; save it as UTF-8"
        ) from None


def _next_copy(parent: Path, name: str) -> Path:
    """Return a new file name, by the time of day: no copy overwrites an older one."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = strftime("%Y-%m-%d_%H.%M.%S")
    count = len(list(parent.glob(f"{stamp}*")))
    return parent / f"{stamp}{f'_{count}' if count else ''}_{name}"


# Places


def _by_syntax(text: str, name: str) -> Iterator[Place]:
    """Find all definitions of a function in a file that parses."""
    tree = parse(text)
    if tree is None:
        return
    lines = split(text)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for found, node in defined(tree):
        if found == name:
            whole = span(node)
            end = _end_of_comments(lines, whole.stop, node.col_offset)
            below = next(body[body.index(node) + 1 :] for body in bodies if node in body)
            yield Place(whole.start, end, max(end, _end_of_paste(node, below)))


def _end_of_comments(lines: Sequence[str], start: int, column: int) -> int:
    """Return where the comments at the end of a function end; its syntax does not hold them."""
    end = start
    for number, line in enumerate(lines[start:], start + 1):
        if line.strip() and not (line.lstrip().startswith("#") and len(_indent(line)) > column):
            break
        end = number if line.strip() else end
    return end


def _end_of_paste(node: Function, below: Sequence[ast.stmt]) -> int:
    """Return the last line that was pasted below a function, but not into it; 0 for none.

    Such a line uses the function's parameters, or what others of its kind have made from them.
    """
    theirs = {entry.arg for entry in ast.walk(node.args) if isinstance(entry, ast.arg)}
    last = 0
    for statement in takewhile(lambda s: not isinstance(s, Function | ast.ClassDef), below):
        names = [entry for entry in ast.walk(statement) if isinstance(entry, ast.Name)]
        bound = {entry.id for entry in names if isinstance(entry.ctx, ast.Store)}
        used = {entry.id for entry in names} - bound
        if used & theirs or any(isinstance(entry, ast.Return) for entry in ast.walk(statement)):
            theirs |= bound
            last = statement.end_lineno or last
    return last


def _by_indent(text: str, name: str) -> Iterator[Place]:
    """Find each ``def`` and what follows it, to the next line that starts at the same depth."""
    lines = split(text)
    for first, depth in _defs(lines, name):
        end = _next(lines, first + 1, depth, STARTS)
        while first and lines[first - 1].lstrip().startswith("@"):
            first -= 1
        yield Place(first, end, end)


def _up_to_next_definition(text: str, name: str) -> Iterator[Place]:
    """Take what stands between it and the next definition for a part of it that lost its indent."""
    lines = split(text)
    for place, (first, depth) in zip(_by_indent(text, name), _defs(lines, name), strict=True):
        yield Place(place.first, place.end, _next(lines, first + 1, depth, DEFINES))


def _defs(lines: Sequence[str], name: str) -> Iterator[tuple[int, int]]:
    """Yield where lines define a function, and how deep: a method only inside its class."""
    holder, _, own = name.rpartition(".")
    indent = r"[ \t]+" if holder else ""
    define = re.compile(rf"{indent}(async\s+)?def\s+{own}\b")
    is_inside = not holder
    for number, line in enumerate(lines):
        if holder and re.match(r"(class|def|async|@)\b", line):
            is_inside = re.match(rf"class\s+{holder}\b", line) is not None
        if is_inside and define.match(line):
            yield number, _depth(line)


def _next(lines: Sequence[str], start: int, depth: int, pattern: re.Pattern[str]) -> int:
    """Return the line after the last one that is not blank, before what starts something else."""
    end = start
    while end < len(lines):
        if _depth(lines[end]) <= depth and pattern.match(lines[end].lstrip()):
            break
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return end


def _depth(line: str) -> int:
    return len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())


# The new text


def _with_templates(
    text: str, given: Mapping[str, str], found: Mapping[str, Sequence[Place]]
) -> str:
    """Put each template in place of the first definition; leave the others out."""
    lines = split(text)
    places = [
        (place, given[name] if place is all_of_it[0] else "")
        for name, all_of_it in found.items()
        for place in all_of_it
    ]
    for place, template in sorted(places, key=lambda entry: -entry[0].first):
        first = place.first
        while not template and first and not lines[first - 1].strip():
            first -= 1
        lines[first : place.stop] = _as_there(template, lines[place.first])
    return "".join(lines)


def _as_there(template: str, first: str) -> Iterator[str]:
    """Give a template the indent and the line ends of the line that it replaces."""
    indent, end = _indent(first), first[len(first.rstrip("\r\n")) :] or "\n"
    given = _indent(template)
    for line in split(template):
        line = indent + line.removeprefix(given) if line.startswith(given) else line
        yield line.rstrip("\r\n") + end


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _removed(found: Mapping[str, Sequence[Place]]) -> Iterator[str]:
    for name, (place, *others) in found.items():
        if place.stop > place.end:
            yield f"lines {place.end + 1} to {place.stop} below {name}, which are not part of it"
        for other in others:
            yield f"another definition of {name} in lines {other.first + 1} to {other.stop}"


# The proof


def _why_not(data: bytes, names: Iterable[str]) -> str:
    """Return what speaks against a new text, "" if each name in it means what the reset put there.

    It compiles, not only parses: a ``return`` outside of a function is refused too.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "", "exec", dont_inherit=True)
            tree = ast.parse(data)
    except SyntaxError as error:
        return f"would not parse afterwards: line {error.lineno}: {error.msg}"
    except UNPARSABLE as error:
        return f"would not parse afterwards: {error}"
    for name in names:
        meanings = _meanings(tree, name)
        if len(meanings) != 1:
            other = f" in line {meanings[1]}" if meanings else ""
            return f"gives {name} another meaning{other}: remove that first"
    return ""


def _meanings(tree: ast.Module, name: str) -> list[int]:
    """Return the lines that give a name a meaning; of a method, those of its class as well."""
    holder, _, own = name.rpartition(".")
    if not holder:
        return [line for bound, line in _bound(tree) if bound == own]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == holder]
    methods = [line for node in classes for bound, line in _bound(node) if bound == own]
    return methods + _meanings(tree, holder)[1:]


def _bound(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module or a class binds, and the lines, in their order."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0], node.lineno
        yield from _bound(node)
