"""Bodies for tasks 2.10, 2.11 and 2.13."""

from typing import Any

from distlab.grade import WrongResult
from judging.calls import refusal_of, returned

Rows = list[list[list[Any]]]  # by stage its actions, each [kind, micro-batch, chunk]


def rows_of_each(lesson: Any, function: str, sizes: list[list[int]]) -> list[Rows]:
    """The schedules that a function returns for several sizes.

    Raises:
        TypeError: one is no schedule.
    """
    return [_rows_of(lesson, function, *size) for size in sizes]


def _rows_of(lesson: Any, function: str, *numbers: int) -> Rows:
    schedule = returned(function, getattr(lesson, function)(*numbers))
    call = f"{function}({', '.join(map(str, numbers))})"
    if not isinstance(schedule, list) or not all(isinstance(row, list) for row in schedule):
        raise WrongResult(f"{call} should return a list of lists; it returned {schedule!r:.70}")
    return [[_plain(call, action) for action in row] for row in schedule]


def _plain(call: str, action: Any) -> list[Any]:
    names = ("kind", "micro_batch", "chunk")
    try:
        kind, micro_batch, chunk = (getattr(action, name) for name in names)
    except AttributeError:
        raise WrongResult(
            f"{call} should contain actions, as in Action('F', 0), not {action!r}"
        ) from None
    if kind not in ("F", "B") or type(micro_batch) is not int or type(chunk) is not int:
        raise WrongResult(f"{call}: kind is 'F' or 'B', and numbers are ints, not as in {action!r}")
    return [kind, micro_batch, chunk]


def refusal_of_schedule(lesson: Any, function: str, *numbers: int) -> dict[str, str]:
    return refusal_of(lambda: getattr(lesson, function)(*numbers))
