"""Lend functions: a task may be graded with the solutions' versions of functions it builds on.

Task 1.7 is graded with the solution's ``exchange``, from task 1.3:

    def exchange(…): …                          the learner's, replaced by the solution's
    def all_reduce_recursive_doubling(…): …     the learner's, calls the solution's exchange

The swap happens where the learner's file defines the function. A later swap would not reach default
arguments, tables and the imports of other lessons, which would already hold the learner's function.
Classes are lent like functions.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from distlab import lessons
from distlab.course import Course, Task
from distlab.lessons import SOLUTIONS

LEND = "--lend"  # option of pytest and of the learner's commands
NO_LENDER = (
    f"{LEND} takes functions from {SOLUTIONS}/, which this copy of the course comes without: "
    "leave it out"
)
Functions = Mapping[str, Any]  # functions and classes by name
_NOT_LENT = ast.parse("raise NotImplementedError('this function is not lent')").body


@dataclass(frozen=True)
class Loan:
    """The solutions' functions that are lent for the grading of one task.

    Attributes:
        solutions: Folder that contains the functions.
        tasks: Tasks whose functions are lent.
        hidden: Functions that the solutions must not reveal: the graded task's own, and those of
            tasks that it does not build on.
    """

    solutions: Path
    tasks: tuple[Task, ...]
    hidden: frozenset[str]


def loan_for(task: Task, course: Course, solutions: Path, passed: Collection[str]) -> Loan | None:
    """Return the loan for ``task`` from the tasks it builds on; None if there is nothing to lend.

    Args:
        task: Task to grade; its own functions are never lent.
        course: Course, which knows the tasks that ``task`` builds on.
        solutions: Folder that contains the functions.
        passed: Ids of the passed tasks, whose functions are not lent.
    """
    used = course.builds_on(task)
    lent = [other for other in lendable(task, course) if other.id not in passed]
    unused = [other for other in course.tasks if other not in used]
    hidden = frozenset(name for other in unused for name in _top_level(other))
    return Loan(solutions, tuple(lent), hidden) if lent else None


def lendable(task: Task, course: Course) -> list[Task]:
    """Return the tasks that ``task`` builds on and whose functions it can borrow.

    A class is lent only as a whole. If its methods belong to several tasks, it is not lent, because
    one of them may be the graded task.
    """
    owners = Counter((other.template, name) for other in course.tasks for name in _top_level(other))
    return [
        other
        for other in course.builds_on(task)
        if all(owners[other.template, name] == 1 for name in _top_level(other))
    ]


def _top_level(task: Task) -> frozenset[str]:
    """Return the names of a task's top-level functions and classes."""
    return frozenset(name.partition(".")[0] for name in task.functions)


def borrowed(loan: Loan) -> dict[str, Functions]:
    """Import the lent functions, inside a rank; return them keyed by "PHASE.LESSON".

    The solutions are unloaded afterwards, so that the learner's code cannot get at their other
    functions.
    """
    finder = _Solutions(loan)
    sys.meta_path.insert(0, finder)
    by_lesson: dict[str, dict[str, Any]] = {}
    try:
        for task in loan.tasks:
            lesson = f"{task.folder}.{task.lesson}"
            module = lessons.solution_at(lesson)
            functions = {name: getattr(module, name) for name in _top_level(task)}
            by_lesson.setdefault(lesson, {}).update(functions)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == SOLUTIONS]:
            del sys.modules[name]
    return dict(by_lesson)


def swapped(tree: ast.Module, functions: Functions) -> ast.Module:
    """Return a learner's file with its definitions of lent functions replaced by assignments."""
    body = [_taken(node) if _name(node) in functions else node for node in tree.body]
    return ast.fix_missing_locations(ast.Module(body, tree.type_ignores))


def lend(module: ModuleType, functions: Functions) -> None:
    """Give a ``swapped`` file the lent functions before it runs."""
    vars(module).update({_alias(name): function for name, function in functions.items()})


def keep(module: ModuleType, functions: Functions) -> None:
    """Restore the lent functions in a module that has run, in case it redefined them."""
    for name, function in functions.items():
        with suppress(KeyError):
            del vars(module)[_alias(name)]
        vars(module)[name] = function


def _taken(node: ast.stmt) -> ast.stmt:
    """Return ``exchange = _lent_exchange`` for a definition of ``exchange``."""
    name = _name(node)
    value = ast.Name(_alias(name), ast.Load())
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), node)


def _name(node: ast.stmt) -> str:
    """Return the name that a statement defines; "" if it defines none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return ""


def _alias(name: str) -> str:
    return f"_lent_{name}"


class _Solutions(importlib.abc.MetaPathFinder):
    """An import finder for the solutions, installed only while functions are being borrowed."""

    def __init__(self, loan: Loan) -> None:
        self._loan = loan

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a solution, to be loaded without its hidden functions; None for other modules."""
        package, _, rest = name.partition(".")
        if package != SOLUTIONS:
            return None
        place = self._loan.solutions.joinpath(*rest.split(".")) if rest else self._loan.solutions
        if place.is_dir():
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        file = str(place.with_suffix(".py"))
        return ModuleSpec(name, _Redacted(name, file, self._loan.hidden), origin=file)


class _Redacted(importlib.machinery.SourceFileLoader):
    """Loads a solution whose hidden functions raise an exception when called."""

    def __init__(self, name: str, file: str, hidden: Collection[str]) -> None:
        super().__init__(name, file)
        self._hidden = hidden

    def get_code(self, fullname: str) -> Any:
        """Compile the source, not cached bytecode, which would contain the hidden functions."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in self._hidden:
                node.body = [ast.Pass()] if isinstance(node, ast.ClassDef) else _NOT_LENT
        return self.source_to_code(ast.fix_missing_locations(tree), path)
