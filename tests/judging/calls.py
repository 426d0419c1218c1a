"""Calls of a lesson by bodies; errors and wrong results are put into words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from distlab.grade import WrongResult
from distlab.util.tracebacks import CALL, CAUSE

T = TypeVar("T")


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the ValueError that ``call`` raises, "" if it raises none."""
    try:
        call()
    except ValueError as error:
        return f"ValueError: {error}"
    return ""


REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)


def refusal_of(call: Callable[[], object]) -> dict[str, str]:
    """Return the type and the text of what ``call`` raises, both "" if it raises nothing.

    What torch raises of a world that has ended is not a refusal: it is passed on.
    """
    try:
        call()
    except REFUSALS as error:
        is_value_error = isinstance(error, ValueError)  # one of the learner's own is one too
        name = ValueError.__name__ if is_value_error else type(error).__name__
        return {"type": name, "text": str(error)}
    return {"type": "", "text": ""}


@contextmanager
def case_told(case: str, call: str = "a call") -> Iterator[None]:
    """Add the case to what is raised: ``ValueError: no, in run_schedule(…) of a dense model``.

    Args:
        case: Rest of the sentence after the call.
        call: Name of a call that has not noted itself, such as a method's.
    """
    try:
        yield
    except NotImplementedError:  # it says what is to be written
        raise
    except Exception as error:
        with suppress(AttributeError):
            setattr(error, CALL, f"{getattr(error, CALL, call)} {case}")
        raise


@contextmanager
def cause_told(causes: Mapping[str, str], kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Add the likely cause to an error, say one of torch's, whose words are often a riddle.

    Args:
        causes: Sentences to add, by a part of the error's words.
        kind: Type of error.
    """
    try:
        yield
    except kind as error:
        found = next((cause for words, cause in causes.items() if words in str(error)), "")
        if found:
            with suppress(AttributeError):
                setattr(error, CAUSE, found)
        raise


def returned(function: str, value: Any) -> Any:
    """Return what the learner's ``function`` has returned, if it has returned anything.

    Raises:
        WrongResult: it is None.
    """
    if value is None:
        raise WrongResult(f"{function} returned None: is there a return?")
    return value


def typed(function: str, value: Any, kind: type[T]) -> T:
    """Return what the learner's ``function`` has returned, if it is of that type.

    Raises:
        WrongResult: it is something else.
    """
    if not isinstance(returned(function, value), kind):
        raise WrongResult(
            f"{function} should return a {kind.__name__}; it returned a {type(value).__name__}, "
            f"{value!r:.50}"
        )
    return value


def numbers(function: str, value: Any, names: Sequence[str]) -> list[float]:
    """Return the numbers that the learner's ``function`` has returned, one for each name.

    Raises:
        WrongResult: it returned something else.
    """
    expected = f"{function} should return {len(names)} numbers, {' and '.join(names)}"
    try:
        found = [float(number) for number in returned(function, value)]
    except (TypeError, ValueError):
        raise WrongResult(f"{expected}; it returned {value!r:.70}") from None
    if len(found) != len(names):
        raise WrongResult(f"{expected}; it returned {found!r:.70}")
    return found


def pair(function: str, value: Any, names: str) -> tuple[Any, Any]:
    """Return the two things that the learner's ``function`` has returned.

    Raises:
        WrongResult: it returned something else.
    """
    found = returned(function, value)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise WrongResult(f"{function} should return {names}; it returned {found!r:.70}")
    return found[0], found[1]


def int_list(function: str, value: Any) -> list[int]:
    """Return what the learner's ``function`` has returned, if it is a list of Python's own ints.

    Raises:
        WrongResult: it is something else, or holds something else.
    """
    expected = f"{function} should return a list of Python's own ints"
    if not isinstance(returned(function, value), list):
        raise WrongResult(f"{expected}; it returned a {type(value).__name__}, {value!r:.50}")
    for item in value:
        if type(item) is not int:
            raise WrongResult(
                f"{expected}; it contains {item!r:.50}, of type {type(item).__name__}"
            )
    return [*value]
