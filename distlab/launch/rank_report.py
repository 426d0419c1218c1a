"""A rank's own account of how it ended: from an exception to a report that can be sent.

Nothing here may fail: an exception can hold megabytes, or raise when it is asked for its text.
"""

import re
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import cloudpickle
import torch

from distlab.launch import plain, stacks
from distlab.launch.protocol import Outcome, Report
from distlab.util.tracebacks import headline, keep_frames

# Imports that take about a second and that many functions need.
SLOW_IMPORTS = (
    *("torch._dynamo", "distlab.launch.simulation_process"),
    *("sklearn.datasets", "pytest", "hypothesis", "matplotlib.pyplot"),
)
MAX_HEADLINE = 2_000  # characters
MAX_SEARCHED = 20_000
MAX_TRACEBACK = 20_000

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|Timed out waiting|"
    r"ncclRemoteError|NCCL communicator was aborted|failed to (recv|send), got 0 bytes",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


def of_result(result: bytes) -> Report:
    """Report what the function returned, as ``encoded`` gave it."""
    return _report(Outcome.OK, result=result)


def encoded(result: object, *, plain_results: bool) -> bytes:
    """Encode a result; one that is not plain, although it has to be, as the reason for that.

    Raises:
        TypeError: The result cannot be pickled.
    """
    if plain_results:
        return plain.dumps_result(result)
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent to the parent ({error}): "
            "return tensors, numbers, strings or containers of them"
        ) from None


def of_error(error: BaseException, launcher_file: str, given: Sequence[str] = ()) -> Report:
    """Report an exception.

    Args:
        error: what the function has raised.
        launcher_file: the frames of this file around the function are left out.
        given: folders of the caller's machinery: left out too, and with them the libraries, where
            a line of the program is left.
    """
    if isinstance(error, SystemExit):
        return _report(Outcome.EXIT, headline=f"sys.exit({error.code!r})")
    return _report(
        _outcome(error),
        exception=type(error).__name__,
        headline=_clipped(_headline(error), MAX_HEADLINE),
        traceback=_clipped(_traceback(error, launcher_file, given), MAX_TRACEBACK),
    )


def _report(outcome: Outcome, **account: Any) -> Report:
    modules = tuple(name for name in SLOW_IMPORTS if name in sys.modules)
    return Report(outcome, time.monotonic_ns(), modules=modules, **account)


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(
        _beginning(error)
    ):
        return Outcome.OUT_OF_MEMORY
    if any(map(_tells_of_a_lost_peer, _chain(error))):
        return Outcome.SECONDARY
    return Outcome.EXCEPTION


def _tells_of_a_lost_peer(error: BaseException) -> bool:
    if getattr(error, "is_secondary", False):  # raised because another rank had failed
        return True
    return (
        isinstance(error, RuntimeError)
        and _LOST_PEER.search(_beginning(error)) is not None
        and _is_of_distributed(error)
    )


def _is_of_distributed(error: BaseException) -> bool:
    """Whether a process group or its store raised it, not a download that the function made."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    named = re.search("gloo|nccl|store", _beginning(error), re.IGNORECASE)
    return bool(named) or any("torch/distributed" in file for file in files)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _beginning(error: BaseException) -> str:
    """As much of its text as can be searched at once: megabytes would take seconds."""
    return _text(error)[:MAX_SEARCHED]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _headline(error: BaseException) -> str:
    if isinstance(error, SyntaxError):  # whose report begins with the line, not with the message
        return f"{type(error).__name__}: {_text(error)}"
    return headline(error)


def _traceback(error: BaseException, launcher_file: str, given: Sequence[str]) -> str:
    if type(error).__module__.startswith("distlab."):
        return ""  # made for people: the message says it all
    frames: TracebackType | None = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == launcher_file:
        frames = frames.tb_next
    if not frames:
        return ""
    shown = traceback.TracebackException(type(error), error, frames)
    if given:
        keep_frames(shown, partial(_of_program, given=given))
    return "".join(shown.format())


def _of_program(files: Collection[str], given: Sequence[str]) -> Collection[str]:
    """Choose the program's files; all, if none is."""
    return [file for file in files if stacks.is_of_program(file, given)] or files


def _clipped(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
