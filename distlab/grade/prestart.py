"""Loaded by pytest before the grader: a fork server starts while the grader imports torch.

It loads what every simulated world needs, so that the first verdict comes sooner and what a world
computes is only the submission's work.

PYTEST_DONT_REWRITE: the learner's commands have imported this before pytest could.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

from distlab.util import processes

processes.end_at_ctrl_c()  # otherwise pytest would show where it was importing
processes.pause_collection()

from distlab.launch import fork_server  # noqa: E402

PACKAGE = Path(__file__).parents[1]

fork_server.start_ahead("distlab.launch.simulation", "distlab.grade.running")


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """From here on, pytest deals with ctrl-C; the grader and torch are there."""
    processes.raise_at_ctrl_c()
    processes.resume_collection()


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Show where in the tests ctrl-C came; let nothing that it cut off make pytest fail."""
    excinfo.traceback = excinfo.traceback.filter(_is_to_be_shown)
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)


def _is_to_be_shown(entry: Any) -> bool:
    """Return whether an entry of a traceback has a line, and is not the grader's."""
    try:
        return entry.lineno >= 0 and not Path(entry.path).is_relative_to(PACKAGE)
    except TypeError:  # interrupted before its first line; pytest would fail here too
        return False
