"""How bodies call a lesson, so that what it raises or returns is told in words."""

from collections.abc import Callable, Sequence
from typing import Any


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the ValueError that ``call`` raises, "" if it raises none."""
    try:
        call()
    except ValueError as error:
        return f"ValueError: {error}"
    return ""


def returned(function: str, value: Any) -> Any:
    """Return what the learner's ``function`` has returned, if it has returned anything.

    Raises:
        TypeError: it is None.
    """
    if value is None:
        raise TypeError(f"{function} returned None: is there a return?")
    return value


def numbers(function: str, value: Any, names: Sequence[str]) -> list[float]:
    """Return the numbers that the learner's ``function`` has returned, one for each name.

    Raises:
        TypeError: it returned something else.
    """
    expected = f"{function} should return {len(names)} numbers, {' and '.join(names)}"
    try:
        found = [float(number) for number in returned(function, value)]
    except (TypeError, ValueError):
        raise TypeError(f"{expected}; it returned {value!r:.70}") from None
    if len(found) != len(names):
        raise TypeError(f"{expected}; it returned {found!r:.70}")
    return found


def pair(function: str, value: Any, names: str) -> tuple[Any, Any]:
    """Return the two things that the learner's ``function`` has returned.

    Raises:
        TypeError: it returned something else.
    """
    found = returned(function, value)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(f"{function} should return {names}; it returned {found!r:.70}")
    return found[0], found[1]
