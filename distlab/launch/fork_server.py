"""The parent's side of the fork server: start it, make it start ranks, learn of their exits."""

import atexit
import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from distlab.launch import fork_server_main
from distlab.launch.errors import SetupError
from distlab.launch.protocol import WorldFolder
from distlab.util import processes

START_TIMEOUT_S = 120.0  # reading torch from a cold disk may take a while
KILL_TIMEOUT_S = 5.0  # a killed process is gone in milliseconds, unless it is blocked on disk I/O
LOOK_S = 0.2  # interval between checks that the server is not stopped
MAX_WORDS = 20_000  # maximum length of the server's output that an error quotes
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# A server that stays stopped this long is replaced. It has its own session, which ctrl-Z does not
# reach, so only a signal sent to the server itself can have stopped it.
STOPPED_S = 1.0


class ForkServer:
    """One fork server and the ranks it started, at most one world at a time."""

    def __init__(self) -> None:
        """Start the server process, which loads torch; ``await_answer`` waits for that."""
        self._owner_pid = os.getpid()
        self._buffer = b""
        self._preloaded: set[str] = set()
        self._next_look = 0.0
        self._stopped_since: float | None = None  # time of the first check that found it stopped
        self._has_answered = False  # while False, the server is loading torch; nothing to clean up
        self._may_import = False  # True from a ``preload`` until the server answers again
        self._exits: list[tuple[int, int]] = []
        self._folder = Path(tempfile.gettempdir(), f"distlab-{uuid.uuid4().hex}")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 what the server prints
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(self._folder), fork_server_main.METHOD]
            self.process = subprocess.Popen(
                [sys.executable, "-c", fork_server_main.COMMAND, *arguments],
                pass_fds=[theirs.fileno()],
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # ctrl-C must reach only the parent, which ends all ranks
            )

    def await_answer(self) -> None:
        """Wait until the server has loaded torch and is listening.

        Raises:
            SetupError: The server did not start; the message contains its output.
        """
        try:
            self._socket.sendall(fork_server_main.PING)
            self._await(fork_server_main.READY)
            if not self._has_answered:
                # Not earlier, because a server that is still loading would not remove the folder.
                # The call fails if the folder exists: process arguments are public, so another
                # user could have created it.
                self._folder.mkdir(mode=0o700)
            self._has_answered, self._may_import, self._stopped_since = True, False, None
        except (OSError, SetupError) as error:
            raise SetupError(f"the fork server did not start: {error}") from error

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``exits`` has news."""
        return self._socket.fileno()

    def start_rank(self, control: socket.socket, output: int) -> int:
        """Start one rank, hand it copies of the two descriptors, and return its pid.

        Raises:
            SetupError: The fork server was killed, or does not answer.
        """
        try:
            socket.send_fds(self._socket, [fork_server_main.START], [control.fileno(), output])
            return self._await(fork_server_main.STARTED)
        except OSError as error:
            raise SetupError(f"the fork server did not start a rank: {error}") from error

    def exits(self) -> list[tuple[int, int]]:
        """Return the pids and wait statuses of the ranks that have ended since the last call.

        Raises:
            SetupError: The fork server itself was killed; its ranks die with it.
        """
        while self._has_news(0):
            self._receive()
        while (record := self._next_record()) is not None:
            self._exits.append(record[1:])
        news, self._exits = self._exits, []
        return news

    def check(self) -> None:
        """Check, at most every ``LOOK_S`` seconds, that the server is not stopped.

        Raises:
            SetupError: The server has been stopped for ``STOPPED_S`` and would report nothing more.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if not self.is_stopped():
            self._stopped_since = None
        elif self._stopped_since is None:  # perhaps both were stopped, and only we have resumed
            self._stopped_since = now
        elif now - self._stopped_since > STOPPED_S:
            raise SetupError(
                "the fork server was stopped (SIGSTOP); it was ended, the next run starts a new one"
            )

    def is_stopped(self) -> bool:
        """Return True if the server is stopped (SIGSTOP) or being traced."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() in STOPPED
        return False

    def preload(self, names: Iterable[str]) -> None:
        """Ask the server to import modules before the next world, without waiting for it."""
        missing = sorted(set(names) - self._preloaded)
        if missing:
            self._preloaded.update(missing)
            self._may_import = True
            with contextlib.suppress(OSError):  # if the server is dead, the next world will notice
                self._socket.sendall(fork_server_main.PRELOAD + " ".join(missing).encode() + b"\n")

    def kill_leftovers(self) -> None:
        """Kill the ranks and all processes that they started, even those in their own sessions."""
        deadline = time.monotonic() + KILL_TIMEOUT_S  # a process may be blocked on disk I/O
        while (leftovers := self._descendants()) and time.monotonic() < deadline:
            for process in leftovers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.002)  # gives the fork server time to reap them

    def _descendants(self) -> list[psutil.Process]:
        """Return the server's descendants that have not ended."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if not _has_ended(process)]

    @contextlib.contextmanager
    def world_folder(self) -> Iterator[WorldFolder]:
        """Create a folder for one world; it is removed afterwards, even if this process dies."""
        path = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            yield WorldFolder(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def is_usable(self) -> bool:
        """Return True if the server answers and was not inherited through a fork."""
        if self._owner_pid != os.getpid() or self.process.poll() is not None or self.is_stopped():
            return False
        try:
            self.await_answer()
        except SetupError:
            return False
        return True

    def close(self) -> None:
        """End the fork server and, with it, everything it started."""
        self._socket.close()
        if self._owner_pid == os.getpid():
            if self.is_stopped() or self._may_import or not self._has_answered:
                self.kill_leftovers()  # the server cannot notice that its socket has been closed
                self.process.kill()
            try:
                self.process.wait(timeout=KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)  # a killed server does not remove it
        self._log.close()

    def _await(self, kind: bytes) -> int:
        """Return the pid in the next record of ``kind``; keep the exits that arrive before it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            while (record := self._next_record()) is None:
                if self._has_news(LOOK_S):
                    self._receive()
                elif time.monotonic() > deadline:
                    raise TimeoutError("timed out")
                else:
                    self.check()
            if record[0] == kind:
                return record[1]
            self._exits.append(record[1:])

    def _has_news(self, seconds: float) -> bool:
        return bool(select.select([self._socket], [], [], seconds)[0])

    def _receive(self) -> None:
        data = self._socket.recv(4096)
        if not data:
            raise SetupError(
                "the fork server was killed, and its ranks with it; the next run starts a new one"
                + self._last_words()
            )
        self._buffer += data

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=KILL_TIMEOUT_S)  # it may still be printing a traceback
        self._log.seek(0)
        text = self._log.read(MAX_WORDS).decode(errors="replace").strip()
        return f". The last output was:\n{text}" if text else ""

    def _next_record(self) -> tuple[bytes, int, int] | None:
        size = fork_server_main.RECORD.size
        if len(self._buffer) < size:
            return None
        kind, pid, status = fork_server_main.RECORD.unpack(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return kind, pid, status


def _server_environment() -> dict[str, str]:
    """Return our environment, with the one-thread settings that torch and numpy read on import."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


_idle: list[ForkServer] = []  # some may still be loading torch


@contextlib.contextmanager
def borrowed() -> Iterator[ForkServer]:
    """Yield an idle fork server, or a new one; the server is idle again afterwards.

    A server whose world was interrupted by ctrl-C or an error is closed, because it may still
    report on that world. A stopped server is closed too, because it cannot reap its ranks.
    """
    fork_server = _take()
    with _closed_on_error(fork_server):
        yield fork_server
        if not fork_server.is_stopped():
            _idle.append(fork_server)
            return
    fork_server.close()


def start_ahead(*modules: str) -> None:
    """Start a fork server for later use, without waiting until it is ready.

    That way, this process and the server import torch at the same time. The server also imports
    ``modules`` for the first world.
    """
    if not _idle:
        with contextlib.suppress(OSError):  # the call that needs a server will try again
            _idle.append(ForkServer())
            _idle[-1].preload(modules)


def load_ahead(modules: Iterable[str]) -> None:
    """Make the next world's fork server import modules that the ranks will need.

    A rank that has to import them itself takes a second longer, which counts towards its limits.
    """
    if modules:
        with borrowed() as fork_server:
            fork_server.preload(modules)


def _take() -> ForkServer:
    while (idle := _popped()) is not None:
        with _closed_on_error(idle):
            if idle.is_usable():
                return idle
        idle.close()
    fresh = ForkServer()
    with _closed_on_error(fresh):
        fresh.await_answer()
    return fresh


def _popped() -> ForkServer | None:
    with contextlib.suppress(IndexError):  # another thread may have taken the last server
        return _idle.pop()
    return None


@contextlib.contextmanager
def _closed_on_error(fork_server: ForkServer) -> Iterator[None]:
    """Close the server if the block raises an exception, including ctrl-C's KeyboardInterrupt."""
    try:
        yield
    except BaseException:
        fork_server.close()
        raise


def close_idle() -> None:
    """End the idle fork servers."""
    while _idle:
        _idle.pop().close()


@atexit.register
def _leave() -> None:
    """End all fork servers, including those that are still loading."""
    processes.ignore_ctrl_c()  # ctrl-C must not interrupt the cleanup
    close_idle()
