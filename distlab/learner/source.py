"""The functions of a task in a file: where they are, whether they are written, how to replace them.

A task is the functions that course.toml names for it: 1.8 has ``fit_alpha_beta`` too.
"""

import ast
import contextlib
import hashlib
import io
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlab.course import Task
from distlab.learner import files
from distlab.learner.folder import CourseFolder, LearnerError

Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_VERSIONS = 100  # of a file in git, newest first


def functions(text: str) -> dict[str, str]:
    """Return the source of all functions and methods by name, none if it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    lines = _lines(text)
    return {name: "".join(lines[_span(node)]) for name, node in _defined(tree)}


def _lines(text: str) -> list[str]:
    """Split where Python's parser does, which counts no form feed as a line; keep the ends."""
    return list(io.StringIO(text, newline=""))


def _defined(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _defined(node, f"{prefix}{node.name}.")


def _span(node: Function) -> slice:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def to_write(task: Task, template: str) -> dict[str, str]:
    """Return those functions of a template that are a TODO of ``task``, by name."""
    mark = re.compile(rf"NotImplementedError\(\s*[\"']Task {re.escape(task.id)}:")
    return {name: source for name, source in functions(template).items() if mark.search(source)}


def digest(folder: CourseFolder, task: Task) -> str:
    """Return a digest of the task's functions in the learner's file, "" if none is there."""
    found = functions(read(folder.root / task.template))
    source = "".join(found.get(name, "") for name in task.functions)
    return hashlib.sha256(source.encode()).hexdigest()[:16] if source else ""


def read(path: Path) -> str:
    """Return a file's text, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


# Templates as they were


def keep_templates(folder: CourseFolder) -> None:
    """Copy templates that were not copied yet: they are what ``reset`` has without git."""
    for task in folder.course.tasks:
        template, copy = folder.root / task.template, _copy(folder, task)
        if template.is_file() and not copy.exists():
            with contextlib.suppress(OSError):  # without it, all but ``reset`` works
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(template.read_bytes())


def _copy(folder: CourseFolder, task: Task) -> Path:
    return folder.private / "templates" / task.template


def untouched(folder: CourseFolder, task: Task) -> dict[str, str]:
    """Return the task's functions as the course gives them, by name.

    Raises:
        LearnerError: neither git nor the copy has them.
    """
    for text in _versions(folder.root, task.template):
        found = to_write(task, text)
        if task.function in found:
            return found
    found = to_write(task, read(_copy(folder, task)))
    if task.function not in found:
        raise LearnerError(
            f"neither git nor {folder.private.name}/templates has {task.template} "
            f"with {task.function} unwritten"
        )
    return found


def _versions(root: Path, path: Path) -> Iterator[str]:
    """Yield what git has of a file, newest first: learners commit their own code as well."""
    commits = _git(root, "rev-list", f"--max-count={MAX_VERSIONS}", "HEAD", "--", str(path))
    for commit in commits.split():
        yield _git(root, "show", f"{commit}:./{path.as_posix()}")


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints, "" if it or the repository is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8"
        )
    except (OSError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


# Putting one back


def reset(folder: CourseFolder, task: Task) -> Path:
    """Put the task's functions back to their template; return the copy of the old file.

    All the rest stays as it is, byte for byte.

    Raises:
        LearnerError: there is no template, or the learner's file does not hold the functions.
    """
    path = folder.root / task.template
    before, templates = _bytes(path), untouched(folder, task)
    text = before.decode("utf-8", errors="surrogateescape")
    for name, template in templates.items():
        text = _replaced(text, name, template, task)
    old = _next_copy(folder.private / "reset" / task.id, path.name)
    old.write_bytes(before)
    files.write(path, text.encode("utf-8", errors="surrogateescape"))
    return old


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _next_copy(parent: Path, name: str) -> Path:
    """Return a new file name, by the time of day: no copy overwrites an older one."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%d_%H.%M.%S")
    count = len(list(parent.glob(f"{stamp}*")))
    return parent / f"{stamp}{f'_{count}' if count else ''}_{name}"


def _replaced(text: str, name: str, new: str, task: Task) -> str:
    """Return ``text`` with another source of the function ``name``, in the text's line ends."""
    lines = _lines(text)
    span = _place(text, lines, name)
    if span is None:
        raise LearnerError(
            f"{task.template} has no {name} to reset; git checkout -- {task.template} brings "
            "the whole file back"
        )
    first = lines[span][0]
    end = first[len(first.rstrip("\r\n")) :] or "\n"
    lines[span] = [line.rstrip("\r\n") + end for line in _lines(new)]
    return "".join(lines)


def _place(text: str, lines: Sequence[str], name: str) -> slice | None:
    """Find the lines of a function, if need be in a file that does not parse."""
    try:
        nodes = dict(_defined(ast.parse(text)))
    except (SyntaxError, ValueError):
        return _place_by_indent(lines, name.rpartition(".")[2])
    return _span(nodes[name]) if name in nodes else None


def _place_by_indent(lines: Sequence[str], name: str) -> slice | None:
    """Find it from its ``def`` to the next line that starts something at the same depth."""
    for first, line in enumerate(lines):
        if found := re.match(rf"( *)(async )?def {name}\b", line):
            end = first + 1
            starts_next = re.compile(rf" {{0,{len(found[1])}}}[\w@#]")
            while end < len(lines) and not starts_next.match(lines[end]):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            return slice(first, end)
    return None
