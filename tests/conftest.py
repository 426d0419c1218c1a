"""A grading suite without the grader must not look graded, and ctrl-C reaches what tests start."""

import signal

import pytest

# A shell that starts pytest in the background lets it ignore ctrl-C, and so would all programs that
# the tests start: those that send ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the tests of a file stay in one process of several, unless they say otherwise."""
    for item in items if config.pluginmanager.has_plugin("xdist") else ():
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
