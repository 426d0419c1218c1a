"""The errors that a suite raises to report a wrong submission."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar


class Wrong(AssertionError):
    """The submission does not do what the task asks; the message is for the learner."""

    kind: ClassVar[str] = "wrong"


class TooDear(Wrong):
    """The submission does what the task asks, but spends more than it needs."""

    kind: ClassVar[str] = "too dear"


class WrongResult(TypeError):
    """A learner's function returned something other than what its task asks for.

    Bodies raise this. The verdict shows the message, with the rank if there are several, but no
    traceback, because none of the lines in it would be the learner's.
    """

    def __init__(self, message: str) -> None:
        """Join the lines of the message, because tensors print on several lines."""
        super().__init__(" ".join(message.split()))


def check(condition: object, message: str) -> None:
    """Raise ``Wrong(message)`` unless ``condition`` holds.

    The message gives the expected and the actual value, the rank, and the likely cause. The plugin
    prepends the task and appends the section of the guidelines.
    """
    if not condition:
        raise Wrong(message)


_put_off: ContextVar[list[TooDear] | None] = ContextVar("put_off", default=None)


def check_cost(condition: object, message: str) -> None:
    """Check a cost alone, such as messages, bytes, memory or time, in the way of ``check``.

    Inside ``costs_last``, the test goes on, so that wrong values later in it are reported first.

    Raises:
        TooDear: ``condition`` does not hold, and no ``costs_last`` is active.
    """
    if condition:
        return
    put_off, error = _put_off.get(), TooDear(message)
    if put_off is None:
        raise error
    put_off.append(error)


@contextmanager
def costs_last() -> Iterator[None]:
    """Let all values of a test be judged before its costs.

    Raises:
        TooDear: The first failed ``check_cost``, once the test has ended without another error.
    """
    put_off: list[TooDear] = []
    token = _put_off.set(put_off)
    try:
        yield
    finally:
        _put_off.reset(token)
    if put_off:
        raise put_off[0]
