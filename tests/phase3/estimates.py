"""Bodies for tasks 3.20 to 3.22, which return the results of a lesson as plain numbers."""

import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from distlab.grade import WrongResult
from judging.calls import case_told, refusal_of, returned
from phase3_multi_node.given import Layout, Memory, StepTime

ESTIMATES: dict[str, Any] = {"estimate_memory": Memory, "estimate_step_time": StepTime}


def numbers_of(lesson: Any, function: str, cases: list[tuple[Any, ...]]) -> list[list[float]]:
    """Call one of the lesson's functions for each case, and return its numbers.

    An estimate has several parts, and therefore several numbers.
    """
    numbers = []
    for case in cases:
        with case_told(f"of {case[0]} as {case[1]}", function):
            numbers.append(_numbers(function, returned(function, getattr(lesson, function)(*case))))
    return numbers


def _numbers(function: str, value: Any) -> list[float]:
    if function not in ESTIMATES:
        return [_number(function, value)]
    kind = ESTIMATES[function]
    if not all(hasattr(value, name) for name in kind._fields):
        raise WrongResult(f"{function} should return a {kind.__name__}; it returned {value!r:.70}")
    return [_number(f"{function}, part {name},", getattr(value, name)) for name in kind._fields]


def _number(what: str, value: Any) -> float:
    if not isinstance(value, Real):  # tensors and arrays are not Real
        raise WrongResult(
            f"{what} should return a number; it returned a {type(value).__name__}, {value!r:.70}"
        )
    return float(value)


def layouts_of(lesson: Any, cases: list[tuple[Any, Any, int]]) -> list[list[list[Any]]]:
    """Return the layouts that the lesson yields for each case, as lists."""
    return [_layouts_of(lesson, *case) for case in cases]


def _layouts_of(lesson: Any, model: Any, machine: Any, batch_size: int) -> list[list[Any]]:
    with case_told(f"of {batch_size} sequences, {model} and {machine}", "layouts"):
        layouts = lesson.layouts(model, machine, batch_size)
        if not isinstance(returned("layouts", layouts), Iterable):
            raise WrongResult(f"layouts should yield layouts; it returned {layouts!r:.50}")
        return [_layout("layouts", layout) for layout in layouts]


def _layout(function: str, value: Any) -> list[Any]:
    names = Layout._fields
    if not all(hasattr(value, name) for name in names):
        raise WrongResult(f"{function} should give Layout(1, 2, 4) or such, not {value!r:.60}")
    *counts, checkpointing, is_split = (getattr(value, name) for name in names)
    for count in counts:
        if not isinstance(count, Real) or int(count) != count:
            raise WrongResult(f"the numbers of a layout are whole; one of them is {count!r:.30}")
    return [*map(int, counts), str(checkpointing), bool(is_split)]


def plans_of(lesson: Any, model: Any, machine: Any, batch_size: int) -> dict[str, Any]:
    """Return each plan's layout and estimates, and how often ``plan`` calls each estimate."""
    calls = dict.fromkeys(ESTIMATES, 0)
    names = inspect.unwrap(lesson.plan).__globals__

    def counting(name: str, estimate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return estimate(*args, **kwargs)

        return call

    names.update({name: counting(name, names[name]) for name in ESTIMATES if name in names})
    plans = returned("plan", lesson.plan(model, machine, batch_size))
    if not isinstance(plans, list):
        raise WrongResult(f"plan should return a list; it returned a {type(plans).__name__}")
    return {"plans": [*map(_plan, plans)], "calls": calls}


def _plan(value: Any) -> list[Any]:
    if not all(hasattr(value, name) for name in ("layout", "memory", "time")):
        raise WrongResult(f"plan should return a list of plans; it contains {value!r:.70}")
    memory, time = map(_numbers, ESTIMATES, (value.memory, value.time))
    return [_layout("plan", value.layout), memory, time]


def refusal_of_plan(lesson: Any, model: Any, machine: Any, batch_size: int) -> dict[str, str]:
    """Return the type and the text of the error that ``plan`` raises."""
    return refusal_of(lambda: lesson.plan(model, machine, batch_size))
