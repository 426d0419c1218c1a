"""The parent's side of the fork server: start it, have it start ranks, hear of their exits."""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import psutil

from distlab.launch import forkserver
from distlab.launch.errors import SetupError

START_TIMEOUT_S = 120.0  # a cold disk may take long to read torch


class Nursery:
    """One fork server and the ranks it started, at most one world at a time."""

    def __init__(self) -> None:
        """Start the fork server; returns when torch is loaded there.

        Raises:
            SetupError: it did not start; the message holds what it printed.
        """
        self._socket, theirs = socket.socketpair()
        self._owner_pid = os.getpid()
        self._buffer = b""
        self._exits: list[tuple[int, int]] = []
        with tempfile.TemporaryFile() as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distlab.launch.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # ctrl-C is for the parent, which ends the ranks itself
            )
            theirs.close()
            self._socket.settimeout(START_TIMEOUT_S)
            try:
                self._await(forkserver.READY)
            except (OSError, SetupError) as error:
                self.close()
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                raise SetupError(f"the fork server did not start: {text or error}") from error
            except BaseException:  # ctrl-C while torch is loading
                self.close()
                raise

    def fileno(self) -> int:
        """Readable when ``exits`` has news."""
        return self._socket.fileno()

    def start_rank(self, control: socket.socket, output: int) -> int:
        """Start one rank on copies of the two descriptors; returns its pid.

        Raises:
            SetupError: the fork server was killed, or does not answer.
        """
        try:
            socket.send_fds(self._socket, [forkserver.START], [control.fileno(), output])
            return self._await(forkserver.STARTED)
        except OSError as error:
            self.process.kill()  # release() then closes this nursery
            raise SetupError(f"the fork server did not start a rank: {error}") from error

    def exits(self) -> list[tuple[int, int]]:
        """Pids and wait statuses of ranks that ended since the last call.

        Raises:
            SetupError: the fork server itself was killed; its ranks die with it.
        """
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receive()
        self._socket.settimeout(START_TIMEOUT_S)
        while (record := self._next_record()) is not None:
            self._exits.append(record[1:])
        news, self._exits = self._exits, []
        return news

    def preload(self, names: list[str]) -> None:
        """Have modules imported ahead of the next world, without waiting for it."""
        if names:
            self._socket.sendall(forkserver.PRELOAD + " ".join(names).encode() + b"\n")

    def kill_leftovers(self) -> None:
        """Kill every process that the world's ranks started, also those that left their session."""
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.process.pid)
            while leftovers := server.children(recursive=True):
                for process in leftovers:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                time.sleep(0.002)  # the fork server reaps them

    def is_usable(self) -> bool:
        """Whether the server lives and belongs to this process, not to one it was forked from."""
        return self._owner_pid == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the fork server and, with it, everything it started."""
        self._socket.close()
        if self._owner_pid == os.getpid():
            try:
                self.process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _await(self, kind: bytes) -> int:
        """Wait for a record of ``kind``; exits that come before it are kept."""
        while True:
            while (record := self._next_record()) is None:
                self._receive()
            if record[0] == kind:
                return record[1]
            self._exits.append(record[1:])

    def _receive(self) -> None:
        data = self._socket.recv(4096)
        if not data:
            raise SetupError(
                "the fork server was killed, and its ranks with it; the next run starts a new one"
            )
        self._buffer += data

    def _next_record(self) -> tuple[bytes, int, int] | None:
        size = forkserver.RECORD.size
        if len(self._buffer) < size:
            return None
        kind, pid, status = forkserver.RECORD.unpack(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return kind, pid, status


def _server_environment() -> dict[str, str]:
    """The parent's environment with one thread per process, set before torch and numpy load."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


_idle: list[Nursery] = []
_lock = threading.Lock()


def acquire() -> Nursery:
    """Take an idle nursery, or start one; give it back with ``release``."""
    with _lock:
        while _idle:
            nursery = _idle.pop()
            if nursery.is_usable():
                return nursery
    return Nursery()


def release(nursery: Nursery) -> None:
    """Keep a nursery for the next world; one that is broken is closed instead."""
    if nursery.is_usable():
        with _lock:
            _idle.append(nursery)
    else:
        nursery.close()


@atexit.register
def close_idle() -> None:
    """End the fork servers that wait for a next world."""
    with _lock:
        while _idle:
            _idle.pop().close()
