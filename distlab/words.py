"""Words of the messages that people read."""

import signal
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

Choose = Callable[[Collection[str]], Collection[str]]
CALL = "__distlab_call__"  # attribute of an exception: the call that it came from, as text


def counted(number: int, noun: str) -> str:
    """Write ``1 rank``, ``2 ranks`` or ``1,024 ranks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """Write ``a``, ``a and b`` or ``a, b and c``."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def signal_name(number: int) -> str:
    """Write ``SIGKILL``, or ``signal 40`` of one that has no name, as the real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def headline(error: BaseException) -> str:
    """Write ``ZeroDivisionError: division by zero, in shard_indices(2, 0, 4)``.

    The call is there if someone has noted it on the exception, as its attribute ``CALL``.
    """
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    call = getattr(error, CALL, "")
    return f"{text}, in {call}" if isinstance(call, str) and call else text


def keep_frames(shown: traceback.TracebackException, choose: Choose) -> None:
    """Drop frames, also in what an error was raised from.

    Args:
        shown: the error.
        choose: given the files of a stack, says which of them to keep.
    """
    kept = set(choose({frame.filename for frame in shown.stack}))
    frames = [frame for frame in shown.stack if frame.filename in kept]
    shown.stack = traceback.StackSummary.from_list(frames)
    group: Any = getattr(shown, "exceptions", None)  # Python 3.11: of an exception group
    for inner in (shown.__cause__, shown.__context__, *(group or ())):
        if inner is not None:
            keep_frames(inner, choose)
