"""What the launching process knows of one rank."""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from distlab.launch import stacks
from distlab.launch.protocol import Outcome, Report

READY_LOOKS = 5  # in a row: then it waits for a processor or a disk, and did not just poll
READY_STATES = "RD"  # of threads, as the system calls them
POLLING_S = 0.03  # of processor time; eight ranks that wait on gloo use 0.01 s in 2 s, each


@dataclass
class RankProcess:
    """What the parent knows of one rank."""

    number: int
    pid: int
    control: socket.socket
    output: int
    has_started: bool = False  # joined the process group
    report: Report | None = None
    exit_status: int | None = None  # as from os.waitpid
    exited_at_ns: int = 0
    place: stacks.Place | None = None  # where it was when it had to be stopped, or crashed
    exceeded_memory: bool = False
    was_stopped: bool = False  # by the parent, because the world had to end
    tail: bytearray = field(default_factory=bytearray)
    pending_line: bytes = b""
    is_silent: bool = False  # nothing more can come from its output
    baseline_bytes: int = 0  # what it had allocated before the function was called
    baseline_cpu_s: float = 0.0  # what it had computed before the function was called
    idle_cpu_s: float = 0.0  # what it had computed when the world was last seen to compute
    looks_ready: int = 0  # how often in a row it was seen to wait for a processor or a disk

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
        """Whether it was waiting for a processor or a disk, or using it, at each of the last looks.

        ``is_idle`` looks.
        """
        return self.looks_ready >= READY_LOOKS

    def text(self) -> str:
        """The tail of what the rank printed, as a terminal would show it."""
        text = bytes(self.tail).decode(errors="replace").replace("\r\n", "\n")
        # A progress bar overwrites its line.
        return "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))

    def own_bytes(self) -> int:
        """The memory it has allocated, without the files that it maps: those the ranks share."""
        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(self.pid).memory_info()
            return int(memory.rss) - int(getattr(memory, "shared", 0))
        return 0

    def cpu_s(self) -> float:
        """The processor time it has used, in all its threads."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def is_suspended(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def is_idle(self) -> bool:
        """Whether it computes nothing, and waits for neither a processor nor a disk.

        Threads of a process group that wait for messages look for them now and then; that is no
        computing. Where the system does not tell what threads wait for, nothing is idle.
        """
        states = _states_of_threads(self.pid)
        self.looks_ready = self.looks_ready + 1 if not states.isdisjoint(READY_STATES) else 0
        has_computed = self.cpu_s() - self.idle_cpu_s > POLLING_S
        return bool(states) and not self.is_ready and not has_computed

    def wants_processor(self) -> bool:
        """Whether a thread of it computes, or waits for a processor or a disk, at this moment."""
        return not _states_of_threads(self.pid).isdisjoint(READY_STATES)

    def has_children(self) -> bool:
        """Whether it waits for processes that it has started, perhaps."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).children())
        return False

    def kill(self) -> None:
        """Kill the rank and all processes of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _states_of_threads(pid: int) -> set[str]:
    """Return the letters that Linux gives: R for running or ready, D for a disk, S for asleep."""
    states = set()
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # of a thread that has just ended
                states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states
