"""The lesson as a test's body sees it; exceptions from its functions show the failed call."""

import contextlib
import functools
import inspect
import reprlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.util.tracebacks import CALL

_NEEDS_NO_CALL = NotImplementedError  # its message already names the task to write


class Lesson:
    """A proxy for a learner's module; it records on each exception which call raised it.

    shard_indices(0, 0, 2)  ->  ZeroDivisionError: division by zero, in shard_indices(0, 0, 2)
    """

    def __init__(self, module: ModuleType) -> None:
        vars(self).update(_module=module, _functions={})

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a name in the module itself, so that its functions use the new value too."""
        setattr(self._module, name, value)
        self._functions.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute; wrap a function so that exceptions record the call."""
        value = getattr(self._module, name)
        if not inspect.isfunction(value):
            return value
        if name not in self._functions:
            self._functions[name] = _noting(value)
        return self._functions[name]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _NEEDS_NO_CALL:
            raise
        except Exception as error:
            with contextlib.suppress(Exception):
                if not hasattr(error, CALL):  # an inner call may already have recorded itself
                    setattr(error, CALL, _text(function.__name__, args, kwargs))
            raise

    return call


def _text(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [_brief(value) for value in args]
    given += [f"{key}={_brief(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(given)})"


class _Brief(reprlib.Repr):
    """Abbreviates arguments and the elements of lists to a few characters on one line."""

    def repr1(self, value: Any, level: int) -> str:
        """Return the shape and dtype of a tensor, the name of a callable, or a shortened repr."""
        if isinstance(value, Tensor):
            return f"<{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
        if isinstance(value, torch.dtype):
            return str(value)
        if callable(value):
            return getattr(value, "__name__", type(value).__name__)
        plain = isinstance(value, bool | int | float | str | list | tuple | dict | type(None))
        if not plain:
            return f"<{type(value).__name__}>"
        return " ".join(super().repr1(value, level).split())


_brief = _Brief().repr
