"""Watch the ranks of one world from the parent: their reports, exits, output, memory and time.

The parent never blocks on a rank and asks nothing of one that is stuck. A world ends when all ranks
have reported; or shortly after the first one failed, time for the others to say what they saw; or
when time is up or memory is short. Whatever then still lives is killed.
"""

import contextlib
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from distlab.launch import stacks
from distlab.launch.errors import SetupError
from distlab.launch.nursery import Nursery
from distlab.launch.protocol import RELEASE, REPORTED, Outcome, Report, WorldFolder

DUMP_SIGNAL = signal.SIGUSR1
GRACE_S = 0.5  # after the first failure, for the other ranks to report theirs
DUMP_S = 1.0  # for all stacks to be written
EXIT_S = 3.0  # for released ranks to leave before they are killed
TICK_S = 0.1  # how often time and memory are looked at
TAIL_BYTES = 64 * 1024


@dataclass
class Rank:
    """What the parent knows of one rank."""

    number: int
    pid: int
    control: socket.socket
    output: int
    report: Report | None = None
    exit_status: int | None = None  # as from os.waitpid
    exited_at_ns: int = 0
    place: stacks.Place | None = None  # where it was when it had to be stopped, or crashed
    exceeded_memory: bool = False
    was_stopped: bool = False  # by the parent, because the world had to end
    tail: bytearray = field(default_factory=bytearray)
    pending_line: bytes = b""
    baseline_bytes: int = 0

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

    def text(self) -> str:
        """The tail of what the rank printed, as a terminal would show it."""
        text = bytes(self.tail).decode(errors="replace").replace("\r\n", "\n")
        return re.sub(r"[^\n]*\r", "", text)  # a progress bar overwrites its line


class Supervisor:
    """Starts the ranks of one world and watches them until none is left."""

    def __init__(
        self,
        nursery: Nursery,
        folder: WorldFolder,
        *,
        timeout_s: float | None,
        memory_limit_bytes: int,
        output_dir: Path | None,
    ) -> None:
        self.nursery, self.folder = nursery, folder
        self.timeout_s, self.memory_limit_bytes = timeout_s, memory_limit_bytes
        self.output_dir = output_dir
        self.ranks: list[Rank] = []
        self.timed_out = False
        self._selector = selectors.DefaultSelector()
        self._files: dict[int, IO[bytes]] = {}

    def run(self, world_size: int) -> list[Rank]:
        """Start ``world_size`` ranks, watch them to the end, and return what is known of each.

        Afterwards no process that they started is left, whatever happened, ctrl-C included.
        """
        started = time.monotonic()
        try:
            for number in range(world_size):
                self._start(number)
            self._selector.register(self.nursery, selectors.EVENT_READ, self._note_exits)
            self._watch(started)
        finally:
            self._end()
        return self.ranks

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        reading, writing = _output_channel()
        with theirs:
            pid = self.nursery.start_rank(theirs, writing)
        os.close(writing)
        rank = Rank(number, pid, ours, reading)
        self.ranks.append(rank)
        ours.sendall(f"{self.folder.path}\n{number}".encode())
        ours.setblocking(False)
        os.set_blocking(reading, False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._note_word(rank))
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._note_output(rank))
        if self.output_dir:
            self._files[number] = (self.output_dir / f"rank-{number}.log").open("wb")

    def _watch(self, started: float) -> None:
        failed_at = None
        while any(rank.is_running for rank in self.ranks):
            self._turn(TICK_S)
            now = time.monotonic()
            if failed_at is None and any(rank.has_failed for rank in self.ranks):
                failed_at = now
            if failed_at is not None and now - failed_at > GRACE_S:
                return self._locate_running()
            if self.timeout_s is not None and now - started > self.timeout_s:
                self.timed_out = True
                return self._locate_running()
            self._check_memory()
        if all(rank.has_returned for rank in self.ranks):
            self._release()
        return None

    def _turn(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            react: Callable[[], None] = key.data
            react()

    def _turn_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self._turn(0.02)

    # What ranks and fork server have to say

    def _note_word(self, rank: Rank) -> None:
        try:
            words = rank.control.recv(16)
        except ConnectionResetError:
            words = b""
        if REPORTED in words:
            rank.report = self.folder.read_report(rank.number)
        if not words:  # the rank's end is closed; its exit comes through the fork server
            self._selector.unregister(rank.control)

    def _note_exits(self) -> None:
        by_pid = {rank.pid: rank for rank in self.ranks}
        for pid, status in self.nursery.exits():
            if rank := by_pid.get(pid):
                rank.exit_status, rank.exited_at_ns = status, time.monotonic_ns()
                if os.WIFSIGNALED(status) and not rank.place:
                    rank.place = stacks.read_crash(self._dump(rank))

    def _note_output(self, rank: Rank) -> None:
        try:
            data = os.read(rank.output, 65536)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other end was closed
            data = b""
        if not data:
            self._selector.unregister(rank.output)
        rank.tail += data
        del rank.tail[:-TAIL_BYTES]
        if file := self._files.get(rank.number):
            file.write(data)
        whole, rank.pending_line = _split_at_line_end(rank.pending_line + data)
        _show(whole)

    # Memory

    def _check_memory(self) -> None:
        """Stop the largest rank if all together have grown beyond the limit."""
        used = {rank.number: _grown_bytes(rank) for rank in self.ranks if rank.is_running}
        if sum(used.values()) > self.memory_limit_bytes:
            largest = self.ranks[max(used, key=lambda number: used[number])]
            largest.exceeded_memory = True
            self._locate([largest])
            _signal_session(largest.pid, signal.SIGKILL)

    # The end

    def _locate_running(self) -> None:
        self._locate([rank for rank in self.ranks if rank.is_running])

    def _locate(self, ranks: list[Rank]) -> None:
        """Have ranks dump their stacks, from C, and read where each one is."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, DUMP_SIGNAL)
        self._turn_until(lambda: all(self._has_dumped(rank) for rank in ranks), DUMP_S)
        for rank in ranks:
            if rank.is_running:  # not one that ended meanwhile
                place = stacks.read_place(self._dump(rank))
                rank.place = stacks.SUSPENDED if _is_suspended(rank.pid) else place

    def _dump(self, rank: Rank) -> str:
        path = self.folder.stacks(rank.number)
        return path.read_text(errors="replace") if path.exists() else ""

    def _has_dumped(self, rank: Rank) -> bool:
        # The main thread comes last in a dump, and its outermost frame at the very end.
        return not rank.is_running or self._dump(rank).endswith("in _run_module_as_main\n")

    def _release(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.control.sendall(RELEASE)
        self._turn_until(self._all_exited, EXIT_S)

    def _all_exited(self) -> bool:
        return all(rank.exit_status is not None for rank in self.ranks)

    def _end(self) -> None:
        """Kill what is left, drain what was printed, close everything."""
        with contextlib.suppress(SetupError, OSError):
            for rank in self.ranks:
                if rank.exit_status is None:
                    rank.was_stopped = rank.report is None
                    _signal_session(rank.pid, signal.SIGKILL)
            self.nursery.kill_leftovers()
            self._turn_until(self._all_exited, EXIT_S)
            self._turn(0)
        for rank in self.ranks:
            _show(rank.pending_line)
            rank.control.close()
            os.close(rank.output)
        self._selector.close()
        for file in self._files.values():
            file.close()


def _output_channel() -> tuple[int, int]:
    """A pipe for what a rank prints; a terminal if ours is one, so that progress bars show."""
    if sys.stdout.isatty():
        return os.openpty()
    return os.pipe()


def _split_at_line_end(data: bytes) -> tuple[bytes, bytes]:
    """Split into what can be shown without cutting a line of one rank by one of another."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], data[end:]


def _show(data: bytes) -> None:
    if data:
        sys.stdout.write(data.decode(errors="replace").replace("\r\n", "\n"))
        sys.stdout.flush()


def _grown_bytes(rank: Rank) -> int:
    """How much a rank's memory has grown since it was first seen; forks share what was there."""
    with contextlib.suppress(psutil.Error):
        resident = int(psutil.Process(rank.pid).memory_info().rss)
        rank.baseline_bytes = rank.baseline_bytes or resident
        return resident - rank.baseline_bytes
    return 0


def _is_suspended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _signal_session(pid: int, number: signal.Signals) -> None:
    """Signal a rank and all processes of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
