"""Replacing attributes of modules and classes for a while."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Replace = Callable[[Any, str, object], Any]  # (owner, name, value) -> the original


def replace_until(undo: ExitStack, owner: Any, name: str, value: object) -> Any:
    """Set an attribute until ``undo`` is closed; return the original."""
    original = getattr(owner, name)
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])  # keeps a staticmethod one
    else:
        undo.callback(delattr, owner, name)  # a class inherits it
    setattr(owner, name, value)
    return original
