"""Bodies for tasks 3.21 to 3.23: results of the learner's functions, as plain numbers."""

import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from distlab.grade import WrongResult
from judging.calls import case_told, refusal_of, returned
from phase3_multi_node.given import Layout, Machine, Memory, StepTime, Transformer

PARTS = {"estimate_memory": Memory._fields, "estimate_step_time": StepTime._fields}


def numbers_of(lesson: Any, function: str, cases: list[tuple[Any, ...]]) -> list[float]:
    """Return the number that a function returns in each case."""
    return [_number(function, _called(lesson, function, case)) for case in cases]


def parts_of(lesson: Any, function: str, cases: list[tuple[Any, ...]]) -> list[list[float]]:
    """Return the parts that a function returns in each case, in order."""
    return [_parts(function, _called(lesson, function, case)) for case in cases]


def _called(lesson: Any, function: str, case: tuple[Any, ...]) -> Any:
    with case_told(f"of {case[0]} as {case[1]}", function):
        return returned(function, getattr(lesson, function)(*_typed(case)))


def _typed(case: tuple[Any, ...]) -> list[Any]:
    model, layout, *rest = case
    return [Transformer(*model), Layout(*layout), *map(_machine, rest)]


def _machine(value: Any) -> Any:
    return Machine(*value) if isinstance(value, tuple | list) else value


def _number(what: str, value: Any) -> float:
    if not isinstance(value, Real):  # a tensor or an array is none
        raise WrongResult(
            f"{what} should return a number; it returned a {type(value).__name__}, {value!r:.70}"
        )
    return float(value)


def _parts(function: str, value: Any) -> list[float]:
    names = PARTS[function]
    kind = "Memory" if function == "estimate_memory" else "StepTime"
    if not all(hasattr(value, name) for name in names):
        raise WrongResult(f"{function} should return a {kind}; it returned {value!r:.70}")
    return [_number(f"{function}, part {name},", getattr(value, name)) for name in names]


def layouts_of(lesson: Any, cases: list[tuple[Any, Any, int]]) -> list[list[list[Any]]]:
    """Return the layouts of each case, as lists."""
    return [_layouts_of(lesson, *case) for case in cases]


def _layouts_of(lesson: Any, model: Any, machine: Any, batch_size: int) -> list[list[Any]]:
    with case_told(f"of {batch_size} sequences, {model} and {machine}", "layouts"):
        layouts = lesson.layouts(Transformer(*model), Machine(*machine), batch_size)
        if not isinstance(returned("layouts", layouts), Iterable):
            raise WrongResult(f"layouts should yield layouts; it returned {layouts!r:.50}")
        return [_layout("layouts", layout) for layout in layouts]


def _layout(function: str, value: Any) -> list[Any]:
    names = Layout._fields
    if not all(hasattr(value, name) for name in names):
        raise WrongResult(f"{function} should give Layout(1, 2, 4) or such, not {value!r:.60}")
    values = [getattr(value, name) for name in names]
    *counts, checkpointing, is_split = values
    return [*map(_whole, counts), str(checkpointing), bool(is_split)]


def _whole(value: Any) -> int:
    if not isinstance(value, Real) or int(value) != value:
        raise WrongResult(f"the numbers of a layout are whole; one of them is {value!r:.30}")
    return int(value)


def plans_of(lesson: Any, model: Any, machine: Any, batch_size: int) -> list[list[Any]]:
    """Return the layout of each plan, and the parts of both estimates."""
    plans = returned("plan", lesson.plan(Transformer(*model), Machine(*machine), batch_size))
    if not isinstance(plans, list):
        raise WrongResult(f"plan should return a list; it returned a {type(plans).__name__}")
    return [_plan(plan) for plan in plans]


def estimates_of_plan(lesson: Any, model: Any, machine: Any, batch_size: int) -> dict[str, int]:
    """Return how often plan calls each of the estimates of its lesson."""
    calls = dict.fromkeys(PARTS, 0)
    names = inspect.unwrap(lesson.plan).__globals__

    def counting(name: str, estimate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return estimate(*args, **kwargs)

        return call

    names.update({name: counting(name, names[name]) for name in PARTS if name in names})
    returned("plan", lesson.plan(Transformer(*model), Machine(*machine), batch_size))
    return calls


def _plan(value: Any) -> list[Any]:
    if not all(hasattr(value, name) for name in ("layout", "memory", "time")):
        raise WrongResult(f"plan should return a list of plans; it contains {value!r:.70}")
    memory = _parts("estimate_memory", value.memory)
    return [_layout("plan", value.layout), memory, _parts("estimate_step_time", value.time)]


def refusal_of_plan(lesson: Any, model: Any, machine: Any, batch_size: int) -> dict[str, str]:
    """Return the type and the text of the error that plan raises."""
    return refusal_of(lambda: lesson.plan(Transformer(*model), Machine(*machine), batch_size))
