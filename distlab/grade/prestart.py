"""Loaded by pytest before the grader: a fork server starts while the grader imports torch.

It loads what every simulated world needs, so that the first verdict comes sooner and what a world
computes is only the submission's work.

PYTEST_DONT_REWRITE: the learner's commands have imported this before pytest could.
"""

from typing import Any

import pytest

from distlab import garbage, interrupts

interrupts.end_at_once()  # otherwise pytest would show where it was importing
garbage.pause()

from distlab.launch import fork_server  # noqa: E402

fork_server.start_ahead("distlab.launch.simulation_process", "distlab.grade.running")


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """From here on, pytest deals with ctrl-C; the grader and torch are there."""
    interrupts.raise_again()
    garbage.resume()


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Leave out frames that ctrl-C met before their first line: pytest fails to show them."""
    excinfo.traceback = excinfo.traceback.filter(_has_line)


def _has_line(entry: Any) -> bool:
    try:
        return bool(entry.lineno >= 0)
    except TypeError:  # Python knows none
        return False
