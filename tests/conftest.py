"""A grading suite without the grader must not look graded, and ctrl-C reaches what tests start.

Several processes that share the tests share the cores too, and compute with one thread each.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiers

# A shell that starts pytest in the background lets it ignore ctrl-C, and so would all programs that
# the tests start: those that send ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GRADER = "distlab.grade.plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs both tiers."""
    tiers.add_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of the second tier, unless it is asked for."""
    return tiers.is_left_out(collection_path, config) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out all wrong answers of a task but one, unless the second tier is asked for."""
    tiers.leave_out_answers(items, config)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where pytest was told to leave the course's settings out.

    Workers of pytest-xdist inherit the number of threads, as do the programs that tests start.
    OpenMP's threads wait for one another by spinning: with more of them than cores, a training in
    a test took six times as long, and kept the cores from the other tests.

    Raises:
        UsageError: the grader is not loaded.
    """
    if not config.pluginmanager.has_plugin(GRADER):
        raise pytest.UsageError(
            f"{GRADER} is not loaded: pytest must read the course's pyproject.toml; leave out -c, "
            "-o addopts and -p no:"
        )
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let several processes share the tests as ``by_file`` says, whatever ``--dist`` asks for."""
    from by_file import ByFile  # only where there is xdist

    return ByFile(config, log)
