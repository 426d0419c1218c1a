"""The parts of an exception that are shown: its headline, and the frames of the program."""

import traceback
from collections.abc import Callable, Collection
from typing import Any

Choose = Callable[[Collection[str]], Collection[str]]
# Optional attributes of an exception, as text: the call that raised it, and its likely cause.
CALL, CAUSE = "__distlab_call__", "__distlab_cause__"


def headline(error: BaseException) -> str:
    """Return an exception's type and text, with the call that raised it and its cause, if known.

    For example: ZeroDivisionError: division by zero, in shard_indices(2, 0, 4). No rank is left

    The call and the cause come from the exception's attributes ``CALL`` and ``CAUSE``, and follow
    the first line of its text.
    """
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    call, cause = _noted(error, CALL), _noted(error, CAUSE)
    if not call and not cause:
        return text
    first, newline, rest = text.partition("\n")
    first = first.rstrip(".") + (f", in {call}" if call else "")
    return f"{first}. {cause}{newline}{rest}" if cause else f"{first}{newline}{rest}"


def _noted(error: BaseException, name: str) -> str:
    text = getattr(error, name, "")
    return text if isinstance(text, str) else ""


def is_message_enough(error: BaseException) -> bool:
    """Return True for distlab's own errors, whose message is enough without a traceback.

    Errors of ``distlab.mpi`` are excluded, because the program causes them, and the traceback shows
    where.
    """
    module = type(error).__module__
    return module.startswith("distlab.") and not module.startswith("distlab.mpi")


def keep_frames(shown: traceback.TracebackException, choose: Choose) -> None:
    """Drop frames from an error and from the errors that led to it.

    Args:
        shown: Error to shorten.
        choose: Function that takes the files of a stack and returns those to keep.
    """
    kept = set(choose({frame.filename for frame in shown.stack}))
    frames = [frame for frame in shown.stack if frame.filename in kept]
    shown.stack = traceback.StackSummary.from_list(frames)
    group: Any = getattr(shown, "exceptions", None)  # for an exception group (Python 3.11)
    for inner in (shown.__cause__, shown.__context__, *(group or ())):
        if inner is not None:
            keep_frames(inner, choose)
