"""Start Python programs in new processes without spending two seconds on importing torch.

    Popen ──arguments, folder, variables, descriptors──▶ source: a process with torch imported
          ◀─pid───────────────────────────────────────── └─fork─fork──▶ the program

The program becomes a child of the process that calls Popen, as usual. To make that happen, the
source forks twice and the process in the middle exits, while the caller is briefly a "subreaper",
which adopts orphans. No course module is imported before the fork. Each program has its own source,
so any processes that it starts, such as the grader or its fork server, are forked too. On systems
other than Linux, all programs start as usual.

Tests of startup, exit, signals or terminals do not use this module.
"""

import ctypes
import inspect
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

LENGTH = struct.Struct("=q")
SERVE = "__import__('program_source').serve()"
UNBUFFERED = "-u"
PR_SET_CHILD_SUBREAPER = 36
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # because many programs share a core

RealPopen = subprocess.Popen
_lock = threading.Lock()
_source: socket.socket | None = None
source_pid = 0  # pid of the source that this process started, or 0


class Request(NamedTuple):
    """A program to start.

    Attributes:
        places: Numbers that the descriptors sent with the request will have in the program.
    """

    arguments: list[str]
    folder: str
    variables: dict[str, str]
    places: list[int]
    has_own_session: bool


class ForkingPopen(RealPopen):  # type: ignore[type-arg]
    """A Popen that starts Python programs by forking the source."""

    def _execute_child(self, *given: Any) -> None:
        real = RealPopen._execute_child  # type: ignore[attr-defined]
        asked = inspect.signature(real).bind(self, *given).arguments
        if _source is None or not _can_be_forked(asked):
            real(self, *given)
            return
        standard = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        numbers = [k if number == -1 else number for k, number in enumerate(standard)]
        kept = list(asked["pass_fds"])
        variables = dict(os.environ if asked["env"] is None else asked["env"])
        folder = os.path.abspath(asked["cwd"] or "")
        arguments = [os.fspath(word) for word in asked["args"]]
        new_session = bool(asked["start_new_session"])
        request = Request(arguments, folder, variables, [0, 1, 2, *kept], new_session)
        self.pid = _started(_source, request, [*numbers, *kept])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _can_be_forked(asked: dict[str, Any]) -> bool:
    """Return True if the command runs Python with the same settings as the source."""
    words = asked["args"]
    if isinstance(words, (str, bytes)) or os.fspath(words[0]) != sys.executable:
        return False
    first = next((os.fspath(word) for word in words[1:] if word != UNBUFFERED), "-")
    is_plain = first in ("-c", "-m") or not first.startswith("-")
    return is_plain and asked["preexec_fn"] is None and _settings(asked["env"]) == _settings(None)


def _settings(variables: dict[str, str] | None) -> dict[str, str]:
    """Return the variables that Python reads at startup, except PYTHONPATH."""
    known = os.environ if variables is None else variables
    return {
        name: text
        for name, text in known.items()
        if name.startswith("PYTHON") and name != "PYTHONPATH"
    }


def _started(source: socket.socket, request: Request, descriptors: Sequence[int]) -> int:
    """Have the source start a program as a child of this process; return the program's pid."""
    text = json.dumps(request).encode()
    with _lock:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(source, [LENGTH.pack(len(text))], descriptors)
            source.sendall(text)
            return int(LENGTH.unpack(read_exactly(source, LENGTH.size))[0])
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)


@contextmanager
def source() -> Iterator[socket.socket]:
    """Start a process that forks programs; yield the socket that takes requests for them."""
    global source_pid
    ours, theirs = socket.socketpair()
    process = RealPopen(
        [sys.executable, "-c", SERVE, str(theirs.fileno())],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.path.dirname(__file__)},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    source_pid = process.pid
    with process, ours:
        yield ours
        ours.close()


def fork_from(source: socket.socket | None) -> None:
    """From now on, fork this process's programs from ``source``; None restores the usual Popen."""
    global _source
    _source = source
    subprocess.Popen = ForkingPopen if source else RealPopen  # type: ignore[misc]


def read_exactly(source: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        more = source.recv(size - len(text))
        if not more:
            raise EOFError("the other end has gone")
        text += more
    return text


def prctl(option: int, value: int) -> None:
    libc: Any = ctypes.CDLL(None)
    libc.prctl(option, value)
