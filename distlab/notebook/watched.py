"""Run a module of ipyparallel for as long as the notebook's process lives, however that ends.

    python -m distlab.notebook.watched PID ipyparallel.engine …

A killed notebook can end nothing itself, so its engines and their controller watch it.
"""

import contextlib
import os
import runpy
import shutil
import sys
import threading
import time

import psutil

PERIOD_S = 0.25


def command(module: str) -> list[str]:
    """Return the command that runs a module for as long as this process lives."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module]


def _end_with(pid: int) -> None:
    """End this process and its children once another has ended, and remove their files."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended before this line
        process = psutil.Process(pid)
        while is_alive(process):
            time.sleep(PERIOD_S)
    shutil.rmtree(os.environ["IPYTHONDIR"], ignore_errors=True)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def place() -> tuple[int, int]:
    """Return this process's rank in MPI, or 0, and its process id."""
    return int(os.environ.get("PMI_RANK", "0")), os.getpid()


if __name__ == "__main__":
    program, pid, module, *arguments = sys.argv
    threading.Thread(target=_end_with, args=(int(pid),), name="distlab", daemon=True).start()
    sys.argv = [program, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
