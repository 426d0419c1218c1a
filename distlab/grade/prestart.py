"""Start a fork server while the grader imports torch; pytest loads this before the grader.

The server preloads the modules that every simulated world needs. This speeds up the first verdict,
and the imports do not count towards a world's processor time.

PYTEST_DONT_REWRITE: the learner's commands import this before pytest can rewrite it.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

from distlab.util import processes

processes.end_at_ctrl_c()  # otherwise, pytest would show a traceback of imports
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
    """Show which line of a test ctrl-C interrupted; hide errors of interrupted cleanup."""
    excinfo.traceback = excinfo.traceback.filter(_is_to_be_shown)
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)


def _is_to_be_shown(entry: Any) -> bool:
    """Return True if a traceback entry has a line and lies outside distlab."""
    try:
        return entry.lineno >= 0 and not Path(entry.path).is_relative_to(PACKAGE)
    except TypeError:  # interrupted before its first line; pytest would fail on it, too
        return False
