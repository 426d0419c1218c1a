"""A rank's variables: the names that begin with a text, and what ``name?`` says about one."""

import ast
import inspect
import rlcompleter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from types import ModuleType
from typing import Any

from torch import Tensor

from distlab.util.text import clipped, rank_names

MAX_VALUE_CHARS = 400
# Variables with which ranks begin.
GIVEN = ("rank", "world_size", "device", "torch", "dist", "exit", "quit")


def completions(names: dict[str, Any], text: str) -> list[str]:
    """Return the variables or attributes that begin with a text, such as ``x.gr``."""
    complete = rlcompleter.Completer(names).complete
    return [str(match) for match in takewhile(bool, (complete(text, n) for n in count()))]


def description(names: dict[str, Any], name: str) -> str:
    """Return the type, value, signature and documentation of a variable or its attribute.

    Raises:
        NameError: There is no such variable, or it has no such attribute.
    """
    if not _is_name(name):
        raise NameError(f"{name!r} is not the name of a variable")
    try:
        return "\n".join(_lines(eval(name, names)))
    except Exception as error:  # a property or __repr__ may raise anything
        raise NameError(str(error)) from None


def _lines(value: Any) -> Iterator[str]:
    yield f"Type:       {type(value).__name__}"
    if callable(value):
        yield from _signature(value)
    else:
        yield f"Value:      {clipped(repr(value), MAX_VALUE_CHARS)}"
    if documentation := inspect.getdoc(value):
        first, *rest = documentation.splitlines()
        yield f"Docstring:  {first}"
        yield from (f"            {line}".rstrip() for line in rest)


def _signature(function: Any) -> Iterator[str]:
    try:
        yield f"Signature:  {getattr(function, '__name__', '')}{inspect.signature(function)}"
    except (TypeError, ValueError):
        return  # a built-in function, which has none


def kinds(names: Mapping[str, Any]) -> dict[str, str]:
    """Return what the variables are that cells have made, by name, such as ``(2,) float32``."""
    return {
        name: _kind(value)
        for name, value in names.items()
        if not (name.startswith("_") or name in GIVEN or isinstance(value, ModuleType))
    }


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def variable_lines(kinds: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each variable: its name, and what it is on which ranks.

    Args:
        kinds: What the variables of each rank are.
    """
    for name in dict.fromkeys(name for of_rank in kinds for name in of_rank):
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(kinds):
            if name in of_rank:
                ranks.setdefault(of_rank[name], []).append(rank)
        for kind, holders in ranks.items():
            where = "" if len(holders) == len(kinds) else f" ({rank_names(holders)})"
            yield f"{name}  {kind}{where}"


def questioned(source: str) -> str:
    """Return the name that a cell's only line asks about, such as ``x.grad`` of ``x.grad?``."""
    name = source.strip().rstrip("?")
    is_question = source.strip() != name
    return name if is_question and _is_name(name) else ""


def _is_name(text: str) -> bool:
    try:
        node: ast.expr = ast.parse(text, mode="eval").body
    except SyntaxError:
        return False
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
