"""Make mutants of the solutions, each with one small change, by mutmut's operators and three more.

This module uses those of mutmut's operators that imitate mistakes people make: another operator, a
number increased by one, True for False, a removed ``not``, one branch of ``a if b else c``, ``=``
for ``+=``, or an omitted argument. It leaves out those that change texts or replace a value with
None, which crashes no matter what the tests are. The three additional operators omit a statement,
negate a plain condition, or drop a decorator.
"""

import ast
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from mutmut.mutation import mutators

from distlab.course import Task
from wrong_answers.bank import COURSE, ROOT
from wrong_answers.changes import change_between

Node = cst.CSTNode


@dataclass(frozen=True)
class Mutant:
    """A solution with one change, which is given in the format of the banks."""

    task: Task
    function: str
    lesson: str
    change: str


def mutants_of(task: Task) -> Iterator[Mutant]:
    """Make all mutants of the functions that a learner writes for a task."""
    solution = (ROOT / task.solution).read_text(encoding="utf-8")
    module = cst.parse_module(solution)
    functions = _functions(module)
    seen = {solution}
    for name in written_for(task):
        for old, new in mutations(functions[name]):
            lesson = cst.ensure_type(module.deep_replace(old, new), cst.Module).code
            if lesson not in seen and _parses(lesson):
                seen.add(lesson)
                yield Mutant(task, name, lesson, change_between(solution, lesson))


def written_for(task: Task) -> list[str]:
    """Return a task's functions, and helpers that neither a template nor an earlier task has."""
    solution = _functions(cst.parse_module((ROOT / task.solution).read_text(encoding="utf-8")))
    template = _functions(cst.parse_module((ROOT / task.template).read_text(encoding="utf-8")))
    written = {
        name: function
        for name, function in solution.items()
        if name not in template or not function.deep_equals(template[name])
    }
    tasks = [other for other in COURSE.tasks if other.solution == task.solution]
    owners = {name: other for other in tasks for name in named(other.functions, written)}
    for name, owner in list(owners.items()):
        for helper in _helpers(name, written):
            owners.setdefault(helper, owner)
    return [name for name, owner in owners.items() if owner is task]


def named(names: Iterable[str], functions: Iterable[str]) -> list[str]:
    """Return the functions with these names; if a name is a class, return all its methods."""
    prefixes = tuple(f"{name}." for name in names)
    return [function for function in functions if f"{function}.".startswith(prefixes)]


def _helpers(name: str, functions: dict[str, cst.FunctionDef]) -> list[str]:
    """Return the functions that ``name`` calls, directly or indirectly."""
    found, names = [], [name]
    while names:
        caller = names.pop()
        nodes = _walk(functions[caller])
        used = {node.value for node in nodes if isinstance(node, cst.Name)}
        names += [f for f in functions if _is_reached(f, caller, used) and f not in found]
        found += [f for f in names if f not in found]
    return found


def _is_reached(function: str, caller: str, used: Container[str]) -> bool:
    """Return whether a caller uses the name of a function or, for a method, of its class.

    A method's own name counts only inside its class, because many classes have a ``forward``.
    """
    owner, _, name = function.rpartition(".")
    is_at_home = caller.rpartition(".")[0] == owner
    return owner in used or (name in used and (not owner or is_at_home))


def _functions(module: cst.Module) -> dict[str, cst.FunctionDef]:
    """Return a module's functions and methods, keyed by ``f`` or ``Class.f``."""
    found = {}
    for statement in module.body:
        if isinstance(statement, cst.FunctionDef):
            found[statement.name.value] = statement
        if isinstance(statement, cst.ClassDef):
            methods = [node for node in statement.body.body if isinstance(node, cst.FunctionDef)]
            found |= {f"{statement.name.value}.{method.name.value}": method for method in methods}
    return found


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# Operators


def mutations(function: cst.FunctionDef) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of old and new nodes, except in signatures, texts and raised errors."""
    for new in _without_decorator(function):
        yield function, new
    for node in _walk(function.body):
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for new in operator(node):
                    yield node, new


def _walk(node: Node) -> Iterator[Node]:
    if isinstance(node, cst.Annotation | cst.FormattedString) or _is_strict(node):
        return
    yield node
    for child in [] if isinstance(node, cst.Raise) else node.children:
        yield from _walk(child)


def _is_strict(node: Node) -> bool:
    """Return whether a node is zip's ``strict``, which has no effect on equally long arguments."""
    return isinstance(node, cst.Arg) and bool(node.keyword) and node.keyword.value == "strict"


def _fewer_arguments(call: cst.Call) -> Iterator[Node]:
    """Omit a keyword argument or the last one, or replace a sole argument with None."""
    for new in mutators.operator_arg_removal(call):
        is_none = len(new.args) == len(call.args)
        if is_none and len(call.args) == 1:
            yield new
        if is_none or not new.args:
            continue
        left_out = next(arg for arg in call.args if arg not in new.args)
        if _is_strict(left_out):
            continue
        if left_out.keyword or left_out is call.args[-1]:
            last = new.args[-1].with_changes(comma=call.args[-1].comma)
            yield new.with_changes(args=[*new.args[:-1], last])


def _without_statement(line: cst.SimpleStatementLine) -> Iterator[Node]:
    """Replace a statement with ``pass``.

    Assignments are skipped, since the code would crash without them.
    """
    statement = line.body[0]
    is_text = isinstance(statement, cst.Expr) and isinstance(statement.value, cst.BaseString)
    if not is_text and not isinstance(statement, cst.Assign | cst.AnnAssign | cst.Pass):
        yield line.with_changes(body=[cst.Pass()])


def _opposite_condition(node: cst.If) -> Iterator[Node]:
    """Negate a condition in which there is no operator to replace."""
    if isinstance(node.test, cst.Name | cst.Attribute | cst.Call):
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), node.test))


def _without_decorator(function: cst.FunctionDef) -> Iterator[cst.FunctionDef]:
    if function.decorators:
        yield function.with_changes(decorators=function.decorators[1:])


OPERATORS: list[tuple[Any, Callable[[Any], Any]]] = [
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.Call, _fewer_arguments),
    (cst.SimpleStatementLine, _without_statement),
    (cst.If, _opposite_condition),
]
