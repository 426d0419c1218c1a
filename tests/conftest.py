"""Without the grader's plugin, a grading suite must not look as if it had been graded."""

import pytest

GRADER = "distlab.grade.plugin"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where pytest was told to leave the course's settings out.

    Raises:
        UsageError: the grader is not loaded.
    """
    if not config.pluginmanager.has_plugin(GRADER):
        raise pytest.UsageError(
            f"{GRADER} is not loaded: pytest must read the course's pyproject.toml; leave out -c, "
            "-o addopts and -p no:"
        )
