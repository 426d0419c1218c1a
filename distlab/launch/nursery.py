"""The parent's side of the fork server: start it, have it start ranks, hear of their exits."""

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from distlab.launch import forkserver
from distlab.launch.errors import SetupError
from distlab.launch.protocol import WorldFolder

START_TIMEOUT_S = 120.0  # a cold disk may take long to read torch
KILL_TIMEOUT_S = 5.0


class Nursery:
    """One fork server and the ranks it started, at most one world at a time."""

    def __init__(self) -> None:
        """Start the fork server; returns when torch is loaded there.

        Raises:
            SetupError: it did not start; the message holds what it printed.
        """
        self._owner_pid = os.getpid()
        self._buffer = b""
        self._exits: list[tuple[int, int]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="distlab-"))  # of its worlds
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(START_TIMEOUT_S)
        with theirs, self._log.open("wb") as log:
            arguments = [str(theirs.fileno()), str(self._folder), forkserver.METHOD]
            self.process = subprocess.Popen(
                [sys.executable, "-c", forkserver.COMMAND, *arguments],
                pass_fds=[theirs.fileno()],
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # ctrl-C is for the parent, which ends the ranks itself
            )
        try:
            self._await(forkserver.READY)
        except (OSError, SetupError) as error:
            self.close()
            raise SetupError(f"the fork server did not start: {error}") from error
        except BaseException:  # ctrl-C while torch is loading
            self.close()
            raise

    @property
    def _log(self) -> Path:
        """What the server printed."""
        return self._folder / "server.log"

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
            with contextlib.suppress(OSError):  # a dead server is noticed by the next world
                self._socket.sendall(forkserver.PRELOAD + " ".join(names).encode() + b"\n")

    def kill_leftovers(self) -> None:
        """Kill every process that the world's ranks started, also those that left their session."""
        deadline = time.monotonic() + KILL_TIMEOUT_S  # the kernel may hold one in a disk access
        while (leftovers := self._descendants()) and time.monotonic() < deadline:
            for process in leftovers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.002)  # the fork server reaps them

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @contextlib.contextmanager
    def world_folder(self) -> Iterator[WorldFolder]:
        """Make the folder of one world; should this process die, the server removes it."""
        path = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            yield WorldFolder(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def is_usable(self) -> bool:
        """Whether the server lives and belongs to this process, not to one it was forked from."""
        return self._owner_pid == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the fork server and, with it, everything it started."""
        self._socket.close()
        if self._owner_pid == os.getpid():
            try:
                self.process.wait(timeout=KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)  # if the server was killed

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
                + self._last_words()
            )
        self._buffer += data

    def _last_words(self) -> str:
        self.process.wait(timeout=KILL_TIMEOUT_S)  # a traceback may still be on its way
        text = self._log.read_text(errors="replace").strip()
        return f". Its last words:\n{text}" if text else ""

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
_starting: threading.Thread | None = None  # of ``start_ahead``


@contextlib.contextmanager
def borrowed() -> Iterator[Nursery]:
    """Take an idle nursery, or start one; it waits for the next world afterwards.

    One whose world was cut off, by ctrl-C or an error, is closed instead: it may still have
    something to say about that world.
    """
    nursery = _take()
    try:
        yield nursery
    except BaseException:
        nursery.close()
        raise
    with _lock:
        _idle.append(nursery)


def start_ahead(*modules: str) -> None:
    """Start a fork server in the background, for a program that will need one.

    Two processes import torch at the same time then, this one and the server, which goes on with
    ``modules``: the first world has them as well.
    """
    global _starting
    if _starting is None and not _idle:
        _starting = threading.Thread(target=_start_idle, args=modules, daemon=True)
        _starting.start()


def _start_idle(*modules: str) -> None:
    with contextlib.suppress(SetupError, OSError):  # whoever needs one tries again, and reports
        nursery = Nursery()
        nursery.preload(list(modules))
        with _lock:
            _idle.append(nursery)


def _take() -> Nursery:
    if _starting is not None:
        _starting.join()
    with _lock:
        while _idle:
            nursery = _idle.pop()
            if nursery.is_usable():
                return nursery
            nursery.close()
    return Nursery()


@atexit.register
def close_idle() -> None:
    """End the fork servers that wait for a next world."""
    if _starting is not None:
        _starting.join()
    with _lock:
        while _idle:
            _idle.pop().close()
