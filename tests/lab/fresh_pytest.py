"""pytest as a new process runs it, without the two seconds in which that imports torch.

    multiprocessing's fork server, with torch imported ──fork──▶ pytest.main(arguments)

Nothing of the grader is imported before the fork, and it starts a fork server of its own for ranks.
Tests of how a process starts, or of signals to it, start a real one.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_servers = multiprocessing.get_context("forkserver")
_servers.set_forkserver_preload(["torch", "torch.distributed", "numpy"])


def fresh_pytest(
    *arguments: object, folder: Path = ROOT, timeout_s: float = 120.0, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run pytest, and wait for it.

    Args:
        arguments: pytest's.
        folder: to run it in.
        timeout_s: after which it is killed.
        environment: more variables.

    Raises:
        TimeoutExpired: it did not end in time.
    """
    command = ["pytest", *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        names = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)]
        process = _servers.Process(target=_be_pytest, args=(command, folder, variables, names))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s, _text(output), _text(errors))
        return subprocess.CompletedProcess(command, process.exitcode, _text(output), _text(errors))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _be_pytest(
    command: list[str], folder: Path, variables: Mapping[str, str], outputs: list[str]
) -> None:
    for descriptor, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # servers leave it out
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = command
    sys.path[:0] = [str(folder)]
    import pytest

    try:
        code: int | str | None = pytest.main(command[1:])
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without
    sys.exit(code)
