"""One rank: what the launching process knows about it, and its own account of how it ended.

The functions that build the account must never fail, not even on an exception that holds megabytes
or that raises another when converted to text.
"""

import contextlib
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import psutil
import torch

from distlab.launch import plain, stacks
from distlab.launch.errors import RankFailed
from distlab.launch.protocol import Outcome, Report
from distlab.util.tracebacks import headline, keep_frames

READY_LOOKS = 5  # a rank found ready in this many checks in a row is not just polling
READY_STATES = "RD"  # R: computes, or waits for a processor; D: waits for a disk
# Processor time that polling may use; each of eight ranks that wait on gloo uses 0.01 s in 2 s.
POLLING_S = 0.03


@dataclass
class RankProcess:
    """A rank as the parent knows it."""

    number: int
    pid: int
    control: socket.socket
    output: int
    has_started: bool = False  # True once it has joined the process group
    report: Report | None = None
    exit_status: int | None = None  # as returned by os.waitpid
    exited_at_ns: int = 0
    place: stacks.Place | None = None  # where it was when the parent stopped it or it crashed
    exceeded_memory: bool = False
    was_stopped: bool = False  # True if the parent stopped it, because the world had to end
    tail: bytearray = field(default_factory=bytearray)
    pending_line: bytes = b""
    is_silent: bool = False  # True once its output is closed
    baseline_bytes: int = 0  # memory allocated before the function was called
    baseline_cpu_s: float = 0.0  # processor time used before the function was called
    idle_cpu_s: float = 0.0  # processor time used when the world was last seen computing
    looks_ready: int = 0  # number of checks in a row that found a thread in READY_STATES

    @property
    def has_returned(self) -> bool:
        return self.report is not None and self.report.outcome is Outcome.OK

    @property
    def has_failed(self) -> bool:
        has_ended = self.report is not None or self.exit_status is not None
        return has_ended and not self.has_returned and not self.was_stopped

    @property
    def is_running(self) -> bool:
        return self.report is None and self.exit_status is None

    @property
    def is_ready(self) -> bool:
        """True if the last ``READY_LOOKS`` calls of ``is_idle`` found a thread in READY_STATES."""
        return self.looks_ready >= READY_LOOKS

    def text(self) -> str:
        """Return the tail of the rank's output as a terminal would show it."""
        text = bytes(self.tail).decode(errors="replace").replace("\r\n", "\n")
        # A progress bar keeps overwriting its line; only the last version counts.
        return "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))

    def own_bytes(self) -> int:
        """Return the memory that the rank has allocated, excluding shared mapped files."""
        memory = self._ask(psutil.Process.memory_info)
        return int(memory.rss - getattr(memory, "shared", 0)) if memory else 0

    def cpu_s(self) -> float:
        """Return the processor time that all the rank's threads have used."""
        times = self._ask(psutil.Process.cpu_times)
        return float(times.user + times.system) if times else 0.0

    def is_suspended(self) -> bool:
        return bool(self._ask(psutil.Process.status) == psutil.STATUS_STOPPED)

    def has_children(self) -> bool:
        """Return True if the rank has child processes, for which it may be waiting."""
        return bool(self._ask(psutil.Process.children))

    def _ask(self, question: Callable[[psutil.Process], Any]) -> Any:
        """Ask the system about the process; return None if it has ended."""
        with contextlib.suppress(psutil.Error):
            return question(psutil.Process(self.pid))
        return None

    def is_idle(self) -> bool:
        """Return True if the rank neither computes nor waits for a processor or a disk.

        The threads of a process group poll for messages now and then, which does not count as
        computing. On systems that do not report the states of threads, no rank counts as idle.
        """
        states = _states_of_threads(self.pid)
        self.looks_ready = self.looks_ready + 1 if not states.isdisjoint(READY_STATES) else 0
        has_computed = self.cpu_s() - self.idle_cpu_s > POLLING_S
        return bool(states) and not self.is_ready and not has_computed

    def wants_processor(self) -> bool:
        """Return True if a thread is now computing, or waiting for a processor or a disk."""
        return not _states_of_threads(self.pid).isdisjoint(READY_STATES)

    def kill(self) -> None:
        """Kill the rank and all processes in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _states_of_threads(pid: int) -> set[str]:
    """Return Linux's letters for the states of a process's threads, such as R, D and S."""
    states = set()
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread may have ended meanwhile
                states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


# Imports that take about a second and that many functions need.
SLOW_IMPORTS = (
    *("torch._dynamo", "distlab.launch.simulation"),
    *("sklearn.datasets", "pytest", "hypothesis", "matplotlib.pyplot"),
)
MAX_HEADLINE = 2_000  # maximum number of characters
MAX_SEARCHED = 20_000
MAX_TRACEBACK = 20_000

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|Timed out waiting|"
    r"ncclRemoteError|NCCL communicator was aborted|failed to (recv|send), got 0 bytes",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


def report_of_result(result: bytes) -> Report:
    """Return the report for a result that ``encoded`` has already encoded."""
    return _report(Outcome.OK, result=result)


def encoded(result: object, *, plain_results: bool) -> bytes:
    """Encode a result; if it must be plain data and is not, encode the reason instead.

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


def decoded(results: Sequence[bytes], *, plain_results: bool) -> list[Any]:
    """Decode the results of all ranks, each of which called ``encoded``.

    Raises:
        RankFailed: A result had to be plain data and was not.
    """
    if not plain_results:
        return [pickle.loads(result) for result in results]
    values = []
    for rank, result in enumerate(results):
        try:
            values.append(plain.loads_result(result))
        except plain.NotPlainError as error:
            who = f"rank {rank} of {len(results)}"
            raise RankFailed(f"{who} returned {error}", rank=rank) from None
    return values


def report_of_error(error: BaseException, launcher_file: str, given: Sequence[str] = ()) -> Report:
    """Return the report for an exception.

    Args:
        error: Exception that the function raised.
        launcher_file: File that calls the function; its frames are left out of the traceback.
        given: Folders of the caller's machinery. If there are any, the traceback shows only frames
            of the program, unless it contains none.
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
    """Return True if the error came from a process group or its store, not from a download, say."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    named = re.search("gloo|nccl|store", _beginning(error), re.IGNORECASE)
    return bool(named) or any("torch/distributed" in file for file in files)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and the chain of its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _beginning(error: BaseException) -> str:
    """Return the start of the error's text, since searching megabytes would take seconds."""
    return _text(error)[:MAX_SEARCHED]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _headline(error: BaseException) -> str:
    if isinstance(error, SyntaxError):  # Python's own text would begin with the source line
        return f"{type(error).__name__}: {_text(error)}"
    return headline(error)


def _traceback(error: BaseException, launcher_file: str, given: Sequence[str]) -> str:
    if type(error).__module__.startswith("distlab."):
        return ""  # our messages are written for people, and say it all
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
    """Return the program's files, or all files if none belongs to the program."""
    return [file for file in files if stacks.is_of_program(file, given)] or files


def _clipped(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
