"""Watch the ranks of one world from the parent: their reports, exits, output, memory and time.

The parent never blocks on a rank, and expects nothing from a rank that is stuck. A world ends when
all ranks have reported, when time is up or when memory runs short. After a failure, it continues
for a moment, so that other ranks can report theirs. Processes that are still alive at the end are
killed.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from distlab.launch import output, plain, protocol, stacks
from distlab.launch.errors import SetupError
from distlab.launch.fork_server import ForkServer
from distlab.launch.limits import Exceeded, Limits, note_use, num_cores, start_timeout_s
from distlab.launch.protocol import Outcome, Report, Spec, WorldFolder
from distlab.launch.rank import RankProcess

GRACE_S = 0.5  # time for other ranks to report their failures after the first one
ASK_S, ASK_BUSY_S = 0.1, 0.5  # time to write stacks, for an idle and for a busy interpreter
DUMP_S = 1.0  # time to write stacks from C, for ranks that have not answered
EXIT_S = 3.0  # time for released ranks to leave before they are killed
TICK_S = 0.1  # interval between checks of time and memory
# A world that uses more than this share of its memory may compute this many times longer: filling
# memory takes a while on a busy machine, and endless growth should not look like an endless loop.
FILLING_SHARE, FILLING_TIMES = 0.2, 4
# A rank that waits for a processor when time is up, but has processor time left, gets up to this
# many times the limit: the machine is busy, and the limit on processor time still catches a loop.
STARVED_TIMES = 12
TAIL_BYTES = 64 * 1024
LINE_BYTES = 64 * 1024  # limit on a line's length; longer ones are shown in pieces
MAX_SHOWN_BYTES = 256 * 1024  # limit on the output shown of a world whose results must be plain
MEMORY_SHARE = 0.9  # fraction of the memory free at the start that all ranks together may use


class Supervisor:
    """Starts the ranks of one world and watches them until none is left."""

    def __init__(
        self,
        fork_server: ForkServer,
        folder: WorldFolder,
        spec: Spec,
        limits: Limits,
        output_dir: Path | None,
    ) -> None:
        self.fork_server, self.folder, self.spec, self.limits = fork_server, folder, spec, limits
        self.output_dir = output_dir
        self.ranks: list[RankProcess] = []
        self.exceeded: Exceeded | None = None  # the limit that ended the world, if one did
        # Limit on the time since ``_clock_started``.
        self.limit_s: float | None = start_timeout_s(spec.world_size, num_cores())
        self._clock_started = time.monotonic()
        self._has_gone = False  # True once all ranks may call the function
        self._next_look = 0.0
        self._idle_since = 0.0
        self._used_bytes = 0
        self._max_bytes = limits.memory_bytes or int(
            MEMORY_SHARE * psutil.virtual_memory().available
        )
        is_plain = spec.plain_results
        self._max_report_bytes = plain.MAX_REPORT_BYTES if is_plain else protocol.MAX_REPORT_BYTES
        self._selector = selectors.DefaultSelector()
        self._files: dict[int, IO[bytes]] = {}
        self._screen = output.Screen(MAX_SHOWN_BYTES if is_plain else None)
        self._display = output.Display(0)

    def run(self) -> list[RankProcess]:
        """Start the ranks, watch them to the end, and return what is known about each.

        Afterwards, no rank and no process that a rank started is left, even after an error or
        ctrl-C.
        """
        self._clock_started = time.monotonic()
        self._display = output.Display(self.spec.world_size)
        try:
            for number in range(self.spec.world_size):
                self._start(number)
                self._show_start()
            self._selector.register(self.fork_server, selectors.EVENT_READ, self._note_exits)
            self._note_exits()  # some ranks may have ended while others were being started
            self._watch()
        finally:
            self._display.close()
            try:
                self._end()
            finally:
                self._close()
        return self.ranks

    def _start(self, number: int) -> None:
        with contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            with theirs, output.channel() as (reading, writing):
                on_failure.callback(os.close, reading)
                pid = self.fork_server.start_rank(theirs, writing)
            rank = RankProcess(number, pid, ours, reading)
            self.ranks.append(rank)
            on_failure.pop_all()
        if self.output_dir:
            self._files[number] = (self.output_dir / f"rank-{number}.log").open("wb")
        with contextlib.suppress(BrokenPipeError):  # the rank was already killed
            ours.sendall(f"{self.folder.path}\n{number}".encode())
        ours.setblocking(False)
        os.set_blocking(reading, False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._note_word(rank))
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._note_output(rank))

    def _show_start(self) -> None:
        self._display.show(len(self.ranks), sum(rank.has_started for rank in self.ranks))

    def _watch(self) -> None:
        failed_at = None
        while any(rank.is_running for rank in self.ranks):
            self._turn(TICK_S)
            now = time.monotonic()
            if failed_at is None and any(rank.has_failed for rank in self.ranks):
                failed_at = now
            if failed_at is not None and now - failed_at > GRACE_S:
                return self._locate_running()
            if now >= self._next_look:
                self._next_look = now + TICK_S
                self._check_memory()
                self._check_time(now)
                self._show_start()
            if self.exceeded:
                return self._locate_running()
        if all(rank.has_returned for rank in self.ranks):
            self._release()
        return None

    def _go(self) -> None:
        """Let all ranks call the function, and restart the clock for the time limit."""
        self._has_gone = True
        self._display.close()
        self._clock_started = time.monotonic()
        self.limit_s = self.limits.finite_timeout_s
        self._start_to_wait(self._clock_started)
        for rank in self.ranks:
            rank.baseline_bytes, rank.baseline_cpu_s = rank.own_bytes(), rank.cpu_s()
            with contextlib.suppress(OSError):
                rank.control.sendall(protocol.GO)

    def _turn(self, seconds: float) -> None:
        self.fork_server.check()
        for key, _ in self._selector.select(seconds):
            react: Callable[[], None] = key.data
            react()

    def _turn_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self._turn(0.02)

    # Messages, exits and output

    def _note_word(self, rank: RankProcess) -> None:
        try:
            words = rank.control.recv(16)
        except ConnectionResetError:
            words = b""
        if protocol.STARTED in words and not self._has_gone:
            rank.has_started = True
            if all(other.has_started for other in self.ranks):
                self._go()
        if protocol.REPORTED in words:
            rank.report = self._read_report(rank)
            note_use(rank.cpu_s() - rank.baseline_cpu_s, time.monotonic() - self._clock_started)
        if not words:  # the rank's end is closed; the fork server will report the exit
            self._selector.unregister(rank.control)

    def _read_report(self, rank: RankProcess) -> Report:
        try:
            return self.folder.read_report(rank.number, self._max_report_bytes)
        except (OSError, plain.NotPlainError) as error:  # fn may have tampered with the file
            what = f"an error that its process did not report, but {error}"
            return Report(Outcome.EXCEPTION, time.monotonic_ns(), headline=what)

    def _note_exits(self) -> None:
        by_pid = {rank.pid: rank for rank in self.ranks}
        for pid, status in self.fork_server.exits():
            if rank := by_pid.get(pid):
                rank.exit_status, rank.exited_at_ns = status, time.monotonic_ns()
                if os.WIFSIGNALED(status) and not rank.place:
                    place = self._place(rank)
                    rank.place = place if place.frame else None  # SIGKILL leaves no dump

    def _note_output(self, rank: RankProcess) -> None:
        try:
            data = os.read(rank.output, 65536)
        except BlockingIOError:
            return
        except OSError:  # raised by a terminal whose other end is closed
            data = b""
        if not data:
            self._selector.unregister(rank.output)
            rank.is_silent = True
        rank.tail += data
        del rank.tail[:-TAIL_BYTES]
        if file := self._files.get(rank.number):
            file.write(data)
        whole, rank.pending_line = output.split_at_line_end(rank.pending_line + data)
        self._screen.show(whole)
        if len(rank.pending_line) > LINE_BYTES:
            self._screen.show(rank.pending_line)
            rank.pending_line = b""

    # Time and memory

    def _check_time(self, now: float) -> None:
        limit_s, clock_s = self.limit_s, now - self._clock_started
        if limit_s is not None and clock_s > limit_s and not self._is_starved(clock_s / limit_s):
            self.exceeded = Exceeded("time" if self._has_gone else "start", limit_s)
        elif self._has_gone and (self.limits.cpu_s or self.limits.idle_s):
            self._check_computing(now)

    def _is_starved(self, times: float) -> bool:
        """Return True if a rank that has processor time left is waiting for a processor."""
        if not self._has_gone or self.limits.cpu_s is None or times > STARVED_TIMES:
            return False
        return any(rank.is_ready for rank in self.ranks if rank.is_running)

    def _check_computing(self, now: float) -> None:
        """End a world that computes or waits for longer than its limits allow."""
        running = [rank for rank in self.ranks if rank.is_running]
        idle = [rank for rank in running if rank.is_idle()]
        cpu_s, idle_s = self.limits.cpu_s, self.limits.idle_s
        if cpu_s is not None and self._used_bytes > FILLING_SHARE * self._max_bytes:
            cpu_s *= FILLING_TIMES
        if cpu_s is not None and any(r.cpu_s() - r.baseline_cpu_s > cpu_s for r in running):
            self.exceeded = Exceeded("computing", cpu_s)
        elif idle_s is not None:
            if len(idle) < len(running):
                self._start_to_wait(now)
            self._check_waiting(now, running, idle_s)

    def _check_waiting(self, now: float, running: list[RankProcess], idle_s: float) -> None:
        """End a world that waits for too long, except while a rank has child processes.

        On a busy machine, neither the ranks nor this process may get a processor: so few looks that
        all of them found a rank ready prove no wait.
        """
        waited_s = now - self._idle_since
        if waited_s > idle_s / 2 and any(rank.has_children() for rank in running):
            self._start_to_wait(now)
        elif waited_s > idle_s and not any(rank.looks_ready for rank in running):
            self.exceeded = Exceeded("idle", idle_s)

    def _start_to_wait(self, now: float) -> None:
        self._idle_since = now
        for rank in self.ranks:
            rank.idle_cpu_s = rank.cpu_s()

    def _check_memory(self) -> None:
        """Stop the largest rank if all ranks together exceed the memory limit."""
        if not self._has_gone:
            return
        running = [rank for rank in self.ranks if rank.is_running]
        used = {rank.number: rank.own_bytes() - rank.baseline_bytes for rank in running}
        self._used_bytes = sum(used.values())
        if self._used_bytes > self._max_bytes:
            largest = self.ranks[max(used, key=lambda number: used[number])]
            largest.exceeded_memory = True
            self._locate([largest])
            largest.kill()

    # The end

    def _locate_running(self) -> None:
        self._locate([rank for rank in self.ranks if rank.is_running])

    def _locate(self, ranks: list[RankProcess]) -> None:
        """Make ranks dump their stacks, and record where each of them is."""
        if not self._has_gone:
            for rank in ranks:
                rank.place = stacks.READY if rank.has_started else stacks.STARTING
            return
        self._ask_for_stacks(ranks, protocol.DUMP_SIGNAL, ASK_S)
        self._turn_until(lambda: not any(map(self._may_answer, ranks)), ASK_BUSY_S)
        stuck = [rank for rank in ranks if not self._has_dumped(rank)]
        self._ask_for_stacks(stuck, protocol.DUMP_FROM_C_SIGNAL, DUMP_S)
        for rank in ranks:
            if rank.is_running:  # the rank may have ended in the meantime
                rank.place = stacks.SUSPENDED if rank.is_suspended() else self._place(rank)

    def _place(self, rank: RankProcess) -> stacks.Place:
        return stacks.read_place(self.folder.read_stacks(rank.number), given=self.spec.given)

    def _ask_for_stacks(self, ranks: list[RankProcess], number: int, seconds: float) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        self._turn_until(lambda: all(self._has_dumped(rank) for rank in ranks), seconds)

    def _may_answer(self, rank: RankProcess) -> bool:
        """Return True if the rank may still answer: it computes, or waits for a processor."""
        return not self._has_dumped(rank) and rank.wants_processor()

    def _has_dumped(self, rank: RankProcess) -> bool:
        # The main thread comes last in a dump, and its outermost frame at the very end.
        return not rank.is_running or self.folder.read_stacks(rank.number).endswith(
            '"<string>", line 1 in <module>\n'
        )

    def _release(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.control.sendall(protocol.RELEASE)
        self._turn_until(self._all_exited, EXIT_S)

    def _all_exited(self) -> bool:
        return all(rank.exit_status is not None for rank in self.ranks)

    def _end(self) -> None:
        """Kill the remaining processes and read their last output."""
        with contextlib.suppress(SetupError, OSError):
            for rank in self.ranks:
                if rank.exit_status is None:
                    rank.was_stopped = rank.report is None
                    rank.kill()
            self.fork_server.kill_leftovers()
            self._turn_until(self._all_exited, EXIT_S)
            self._turn_until(lambda: all(rank.is_silent for rank in self.ranks), EXIT_S)
        for rank in self.ranks:
            self._screen.show(rank.pending_line)
        self._screen.close({rank.number: bytes(rank.tail) for rank in self.ranks})

    def _close(self) -> None:
        self._selector.close()
        for rank in self.ranks:
            rank.control.close()
            os.close(rank.output)
        for file in self._files.values():
            file.close()
