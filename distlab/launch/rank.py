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


@dataclass
class Rank:
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

    def is_ready(self) -> bool:
        """Whether a thread of it waits for a processor or a disk alone, or nobody can tell."""
        states = _states_of_threads(self.pid)
        return not states or not states.isdisjoint("RD")

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
