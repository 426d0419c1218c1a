"""pytest as a new process runs it, in a fork where there can be one.

Tests of how a process starts, or of signals to it, start a real one.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_S = 1200.0

FreshPytest = Callable[..., "subprocess.CompletedProcess[str]"]


def run(
    *arguments: object, folder: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run pytest, and wait for it.

    Args:
        arguments: pytest's.
        folder: to run it in.
        environment: more variables.
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
