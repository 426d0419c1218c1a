"""Loaded by pytest before the grader: a fork server starts while the grader imports torch.

The server loads the modules of every simulated world, so that the first verdict comes sooner and
a world's computing time is only the submission's.

PYTEST_DONT_REWRITE: the learner's commands have imported this before pytest could.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

from distlab.util import processes

processes.end_at_ctrl_c()  # otherwise pytest would show a traceback of imports
processes.pause_collection()

from distlab.launch import fork_server  # noqa: E402

PACKAGE = Path(__file__).parents[1]

fork_server.start_ahead("distlab.launch.simulation", "distlab.grade.running")


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Leave ctrl-C to pytest, now that the grader and torch are loaded."""
    processes.raise_at_ctrl_c()
    processes.resume_collection()


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Show the line of the tests that ctrl-C interrupted; ignore errors of interrupted cleanup."""
    excinfo.traceback = excinfo.traceback.filter(_is_to_be_shown)
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)


def _is_to_be_shown(entry: Any) -> bool:
    """Return True if an entry of a traceback has a line and is not the grader's."""
    try:
        return entry.lineno >= 0 and not Path(entry.path).is_relative_to(PACKAGE)
    except TypeError:  # interrupted before its first line, where pytest would fail too
        return False
