"""Helpers that start pytest, wait, and find the processes that a test leaves behind."""

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import forked_python
import psutil

ROOT = Path(__file__).parents[2]
LONGEST_S = 1200.0  # far longer than a busy machine needs
FreshPytest = Callable[..., "subprocess.CompletedProcess[str]"]
MARK = "DISTLAB_OF_TEST"  # environment variable that all processes of a test inherit


def children(*, recursive: bool = True) -> list[psutil.Process]:
    """Return this process's descendants, or only its children, without the source of forks."""
    found = psutil.Process().children(recursive=recursive)
    return [process for process in found if process.pid != forked_python.source_pid]


def marked(mark: str) -> list[psutil.Process]:
    """Return the running processes that have ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # the process has ended, or belongs to another user
    return found


def end_fork_server() -> None:
    """Stop multiprocessing's fork server and resource tracker.

    Otherwise, they would run until Python exits, and other tests would find them. There is no
    public way to stop them. Garbage is collected first, because the tracker removes any semaphores
    that are left.
    """
    gc.collect()
    for server in (forkserver._forkserver, resource_tracker._resource_tracker):
        server._stop()  # type: ignore[attr-defined]


def fresh_pytest(
    *arguments: object, folder: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a separate process.

    Args:
        arguments: Command-line arguments.
        folder: Working folder.
        environment: Additional environment variables.
    """
    return subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str] = str) -> None:
    """Wait until a condition is true; if it never is, fail with the text from ``otherwise``."""
    end_s = time.monotonic() + LONGEST_S
    while not is_so():
        assert time.monotonic() < end_s, otherwise()
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
