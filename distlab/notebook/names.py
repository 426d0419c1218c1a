"""A rank's variables: the names that begin with a text, and what ``name?`` says about one."""

import ast
import inspect
import rlcompleter
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

from distlab.util.text import clipped

MAX_VALUE_CHARS = 400


def completions(names: dict[str, Any], text: str) -> list[str]:
    """Return the variables or attributes that begin with a text, such as ``x.gr``."""
    complete = rlcompleter.Completer(names).complete
    return [str(match) for match in takewhile(bool, (complete(text, n) for n in count()))]


def description(names: dict[str, Any], name: str) -> str:
    """Return the type, value, signature and documentation of a variable or its attribute.

    Raises:
        NameError: There is no such variable, or it has no such attribute.
    """
    try:
        value = eval(name, names)
    except (NameError, AttributeError) as error:
        raise NameError(str(error)) from None
    return "\n".join(_lines(value))


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
