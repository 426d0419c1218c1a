"""A cell's code: its statements, and the last expression, whose value is shown."""

import ast
import linecache
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

NAME = "cell "  # names of cells begin so


class Cell(NamedTuple):
    """A compiled cell.

    Attributes:
        name: Name for reports, such as ``cell 3``.
        source: Its text.
        body: Code of its statements.
        value: Code of its last expression; None if it ends with another statement or a semicolon.
    """

    name: str
    source: str
    body: CodeType
    value: CodeType | None

    def run(self, names: dict[str, Any]) -> Any:
        """Run the cell with these variables; return the value of its last expression, or None."""
        exec(self.body, names)
        return None if self.value is None else eval(self.value, names)


def compiled(source: str, name: str) -> Cell:
    """Compile a cell, whose lines tracebacks and reports can then show.

    Raises:
        SyntaxError: The source is not Python.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = len(source), None, lines, name
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or source.rstrip().endswith(";"):
        return Cell(name, source, compile(tree, name, "exec"), None)
    body = compile(ast.Module(tree.body[:-1], []), name, "exec")
    return Cell(name, source, body, compile(ast.Expression(last.value), name, "eval"))


def naming_cells(report: str, numbers: Mapping[str, int]) -> str:
    """Let a report name the notebook's own cells instead of the files that stand for them.

    Args:
        report: Text with places such as ``3726214108.py:16``.
        numbers: Number of the cell by file, as IPython keeps it.
    """
    for file, number in numbers.items():
        report = report.replace(file, f"cell {number}")
        report = report.replace(f"{Path(file).name}:", f"cell {number}:")
    return report


def without_shell(error: BaseException) -> BaseException:
    """Return an error whose traceback begins in a cell, or has no frames if no cell is in it."""
    trace = error.__traceback__
    while trace and not trace.tb_frame.f_code.co_filename.startswith(NAME):
        trace = trace.tb_next
    return error.with_traceback(trace)
