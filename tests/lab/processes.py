"""Processes of tests: starting pytest, waiting, and finding what is left of a test."""

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
LONGEST_S = 1200.0  # far above what a busy machine takes
FreshPytest = Callable[..., "subprocess.CompletedProcess[str]"]
MARK = "DISTLAB_OF_TEST"  # a variable of the first process, inherited by all that it starts


def children(*, recursive: bool = True) -> list[psutil.Process]:
    """Return what this process has started, but for the source that programs are forked from."""
    found = psutil.Process().children(recursive=recursive)
    return [process for process in found if process.pid != forked_python.source_pid]


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has ``mark``; ended ones are left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # it ended, or is another user's
    return found


def end_fork_server() -> None:
    """End the processes that multiprocessing keeps once it has started others by its fork server.

    It has no public way, and otherwise ends them when Python exits: other tests would see them.
    Semaphores that are garbage go first, for the tracker that ends removes what is left of them.
    """
    gc.collect()
    for server in (forkserver._forkserver, resource_tracker._resource_tracker):
        server._stop()  # type: ignore[attr-defined]


def fresh_pytest(
    *arguments: object, folder: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run pytest in a process of its own.

    Args:
        arguments: Arguments of pytest.
        folder: Working folder.
        environment: Additional variables.
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
    """Wait for a condition; fail with a text if it does not come true."""
    end_s = time.monotonic() + LONGEST_S
    while not is_so():
        assert time.monotonic() < end_s, otherwise()
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
