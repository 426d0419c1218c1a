"""Copy contracts and given code from the solutions to the templates.

    make templates                        # rewrites the templates that are out of date
    python -m scripts.templates --check   # only names them, and exits with 1 if there are any

A template takes from its solution the signatures and docstrings of the functions that a learner
writes, all given code, and the first line of the module's docstring. It keeps the rest of its own
docstring, its imports, and the TODO in each function. A function that is new in a solution gets a
TODO to fill in.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distlab.course import Course, Task, load

ROOT = Path(__file__).parents[1]
MAX_WIDTH = 100
TO_FILL_IN = "state the result."
HEADER = """
Task {ids}. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade it: ``distlab check {id}``.
"""


@dataclass
class Source:
    """Python code: its lines, its statements, and its definitions by qualified name."""

    text: str
    lines: list[str] = field(init=False)
    body: list[ast.stmt] = field(init=False)
    names: dict[str, ast.stmt] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.text.splitlines(keepends=True)
        self.body = ast.parse(self.text).body
        self.names = dict(_definitions(self.body))

    @property
    def end_of_imports(self) -> int:
        """Number of lines up to the last import, including the docstring."""
        imports = [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom)]
        return _end([*self.body[:1], *imports][-1])


def main() -> None:
    """Rewrite the templates that are out of date, or only name them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    outdated = outdated_templates(load(ROOT))
    for path, text in outdated.items():
        print(f"{path} is out of date: make templates" if is_check else f"wrote {path}")
        if not is_check:
            (ROOT / path).write_text(text, encoding="utf-8")
    sys.exit(is_check and bool(outdated))


def outdated_templates(course: Course) -> dict[Path, str]:
    """Return the new texts of outdated templates, by path."""
    outdated = {}
    for template, solution in dict.fromkeys(
        (task.template, task.solution) for task in course.tasks
    ):
        tasks = [task for task in course.tasks if task.template == template]
        before = (ROOT / template).read_text("utf-8") if (ROOT / template).is_file() else ""
        text = text_of_template(before, (ROOT / solution).read_text("utf-8"), tasks)
        if text != before:
            outdated[template] = text
    return outdated


def text_of_template(template: str, solution: str, tasks: Sequence[Task]) -> str:
    """Return the text that a template should have.

    Args:
        template: Current text of the template, "" if there is none yet.
        solution: Text of the solution, which defines all functions of ``tasks``.
        tasks: Tasks of the lesson.
    """
    source = Source(solution)
    return _Merge(Source(template or _new_template(source, tasks)), source, tasks).text()


class _Merge:
    """Merges a template with its solution."""

    def __init__(self, template: Source, solution: Source, tasks: Sequence[Task]) -> None:
        self.template, self.solution = template, solution
        self.stubs = {function: task for task in tasks for function in task.functions}

    def text(self) -> str:
        first = self.solution.lines[0].rstrip().removesuffix('"""')
        header = self.template.lines[1 : self.template.end_of_imports]
        given = "".join(self._statements(self.solution.body, "", self.solution.end_of_imports))
        separator = "" if given.startswith("\n") else "\n"
        return "".join([first, "\n", *header, separator, _for_learners(given)])

    def _statements(self, body: list[ast.stmt], prefix: str, start: int) -> Iterator[str]:
        """Yield the text of statements, each with the comments and blank lines above it.

        Args:
            body: Statements of the module or of a class.
            prefix: Qualified name of the class, followed by a dot; "" for the module.
            start: Number of lines of the solution before the statements.
        """
        for node in body:
            if _end(node) <= start:
                continue
            name = f"{prefix}{_name(node)}"
            if self._is_carried_over(node, name):
                yield from self.solution.lines[start : _start(node)]
                yield from self._statement(node, name)
            start = _end(node)

    def _is_carried_over(self, node: ast.stmt, name: str) -> bool:
        """Return True for public code, and for private code that the template already has."""
        is_private = re.search(r"(^|\.)_(?!\w*__$)", name)
        return not _name(node) or not is_private or name in self.template.names

    def _statement(self, node: ast.stmt, name: str) -> Iterator[str]:
        lines = self.solution.lines
        if name in self.stubs and isinstance(node, ast.FunctionDef):
            yield from lines[_start(node) : _end(node.body[0])]
            yield self._body_of_stub(name, " " * node.body[0].col_offset)
        elif isinstance(node, ast.ClassDef):
            yield from lines[_start(node) : _start(node.body[0])]
            yield from self._statements(node.body, f"{name}.", _start(node.body[0]))
        else:
            yield from lines[_start(node) : _end(node)]

    def _body_of_stub(self, name: str, indent: str) -> str:
        """Return the template's TODO, or one to fill in, and the statement that raises an error."""
        task, stub = self.stubs[name], self.template.names.get(name)
        todo = f"{indent}# TODO {task.id}: {TO_FILL_IN}\n{indent}#   Example: \n"
        if isinstance(stub, ast.FunctionDef):
            todo = "".join(self.template.lines[_end(stub.body[0]) : _start(stub.body[-1])])
        return todo + _error(f"Task {task.id}: {name}, ", f"see {task.guide}", indent)


def _error(message: str, where: str, indent: str) -> str:
    """Return the statement that raises the error, formatted as ruff would format it."""
    inside = indent + 4 * " "
    head, end = f"{indent}raise NotImplementedError(", ")\n"
    for text in (
        f'{head}"{message}{where}"{end}',
        f'{head}\n{inside}"{message}{where}"\n{indent}{end}',
    ):
        if max(map(len, text.splitlines())) <= MAX_WIDTH:
            return text
    return f'{head}\n{inside}"{message}"\n{inside}"{where}"\n{indent}{end}'


def _new_template(solution: Source, tasks: Sequence[Task]) -> str:
    """Return a template with a docstring and imports; the rest is merged in later."""
    ids = " and ".join(task.id for task in tasks)
    header = HEADER.format(ids=ids, id=tasks[0].id)
    imports = solution.lines[_end(solution.body[0]) : solution.end_of_imports]
    return f'"""\n{header}"""\n' + _for_learners("".join(imports))


def _for_learners(code: str) -> str:
    """Replace imports of solutions with imports of templates."""
    return re.sub(r"\bsolutions\.(phase\w+)\.(\w+)", r"\1.template_\2", code)


def _definitions(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if name := _name(node):
            yield prefix + name, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{name}.")


def _name(node: ast.stmt) -> str:
    """Return the name that a statement defines, "" if it defines none."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""


def _start(node: ast.stmt) -> int:
    """Return the number of lines before a statement and its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


if __name__ == "__main__":
    main()
