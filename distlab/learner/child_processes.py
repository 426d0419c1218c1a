"""Child processes of the commands; none may outlive its command.

On Linux, the kernel ends a child when its parent ends, for whatever reason. Elsewhere, the parent
ends its children when it gets a signal or loses its terminal. The fork server and the ranks, which
the children start, notice on their own when their parent ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import psutil

from distlab.util import processes

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.5
STOPPED_S = 2.0  # a child that stays stopped this long is killed; ctrl-Z cannot have stopped it


def command(code: str, *arguments: str) -> list[str]:
    """Return the command line of a child that runs ``code``, with ``sys.argv[1:] = arguments``."""
    first = f"from {__name__} import stay_with; stay_with({os.getpid()})"
    return [sys.executable, "-c", f"{first}; {code}", *arguments]


def stay_with(parent: int) -> None:
    """Make this child end with its parent; must be called before anything else."""
    processes.die_with_parent()
    if os.getppid() != parent:  # the parent has already ended
        sys.exit(1)


@contextmanager
def ended_with_us() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind this process like ctrl-C, so that it ends its children."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:  # other handlers, such as nohup's, stay
                before[number] = signal.signal(number, _leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def not_left_stopped(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Inside the block, kill a child and its descendants if it is stopped and so cannot answer."""
    is_over = threading.Event()
    watcher = threading.Thread(target=_end_if_stopped, args=(process.pid, is_over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _end_if_stopped(pid: int, is_over: threading.Event) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        child, last_seen = psutil.Process(pid), time.monotonic()
        while not is_over.wait(LOOK_S):
            if child.status() != psutil.STATUS_STOPPED:
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > STOPPED_S:
                kill(child)
                break


def kill(child: psutil.Process) -> None:
    """Kill a process and all its descendants, even if they are stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*child.children(recursive=True), child]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
