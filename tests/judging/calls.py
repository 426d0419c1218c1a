"""Helpers with which bodies of tests call a lesson's functions; they explain errors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from distlab.grade import WrongResult
from distlab.util.tracebacks import CALL, CAUSE

T = TypeVar("T")


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the ValueError that ``call`` raises, or "" if it raises none."""
    try:
        call()
    except ValueError as error:
        return f"ValueError: {error}"
    return ""


def refused(lesson: Any, function: str, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Call one of the lesson's functions, and return its refusal as ``refusal_of`` does."""
    return refusal_of(lambda: getattr(lesson, function)(*args, **kwargs))


REFUSALS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)


def refusal_of(call: Callable[[], object]) -> dict[str, str]:
    """Return the type and text of the error that ``call`` raises; both are "" if it raises none.

    An error that torch raises because the world has ended is not a refusal, and propagates.
    """
    try:
        call()
    except REFUSALS as error:
        is_value_error = isinstance(error, ValueError)  # true of a learner's subclass, too
        name = ValueError.__name__ if is_value_error else type(error).__name__
        return {"type": name, "text": str(error)}
    return {"type": "", "text": ""}


@contextmanager
def case_told(case: str, call: str = "a call") -> Iterator[None]:
    """Name the case in any error, as in ``ValueError: no, in run_schedule(…) of a dense model``.

    Args:
        case: End of the sentence, such as "of a dense model".
        call: Name for the call if the error has not recorded it, as for a method.
    """
    try:
        yield
    except NotImplementedError:  # its text already says what to write
        raise
    except Exception as error:
        with suppress(AttributeError):
            setattr(error, CALL, f"{getattr(error, CALL, call)} {case}")
        raise


@contextmanager
def cause_told(causes: Mapping[str, str], kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Add the likely cause to an error; torch's, for example, are often cryptic.

    Args:
        causes: Sentences to add, keyed by words that the error's text must contain.
        kind: Type of errors to explain.
    """
    try:
        yield
    except kind as error:
        likely = next((cause for words, cause in causes.items() if words in str(error)), "")
        if likely:
            with suppress(AttributeError):
                setattr(error, CAUSE, likely)
        raise


def returned(function: str, value: Any) -> Any:
    """Return the result of the learner's ``function``, unless it is None.

    Raises:
        WrongResult: The result is None.
    """
    if value is None:
        raise WrongResult(f"{function} returned None: is there a return?")
    return value


def typed(function: str, value: Any, kind: type[T]) -> T:
    """Return the result of the learner's ``function`` if it has the type ``kind``.

    Raises:
        WrongResult: The result has another type, or is None.
    """
    if not isinstance(returned(function, value), kind):
        raise WrongResult(
            f"{function} should return a {kind.__name__}; it returned a {type(value).__name__}, "
            f"{value!r:.50}"
        )
    return value


def numbers(function: str, value: Any, names: Sequence[str]) -> list[float]:
    """Return the numbers that the learner's ``function`` returned, one for each name.

    Raises:
        WrongResult: The result is not a sequence of as many numbers as names.
    """
    expected = f"{function} should return {len(names)} numbers, {' and '.join(names)}"
    try:
        values = [float(number) for number in returned(function, value)]
    except (TypeError, ValueError):
        raise WrongResult(f"{expected}; it returned {value!r:.70}") from None
    if len(values) != len(names):
        raise WrongResult(f"{expected}; it returned {values!r:.70}")
    return values


def pair(function: str, value: Any, names: str) -> tuple[Any, Any]:
    """Return the two values that the learner's ``function`` returned.

    Raises:
        WrongResult: The result is not a pair.
    """
    result = returned(function, value)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise WrongResult(f"{function} should return {names}; it returned {result!r:.70}")
    return result[0], result[1]


def int_list(function: str, value: Any) -> list[int]:
    """Return the result of the learner's ``function`` if it is a list of Python's own ints.

    Raises:
        WrongResult: The result is not a list, or an element is not an int.
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
