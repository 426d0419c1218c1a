"""Settings for all tests: the tiers, ctrl-C, the grader, and pytest-xdist's workers.

A grading suite that runs without the grader must not look as if it had been graded. Workers share
the machine's cores, so each of them computes with one thread.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiers

# A shell that starts pytest in the background makes it ignore ctrl-C. Programs that the tests start
# would ignore it too, and tests that send them ctrl-C would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GRADER = "distlab.grade.plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs both tiers."""
    tiers.add_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files of the second tier unless they are requested."""
    return tiers.is_left_out(collection_path, config) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only one wrong answer per task unless the second tier is requested."""
    tiers.leave_out_answers(items, config)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run without the grader; with several workers, limit each to one thread.

    pytest-xdist's workers inherit the number of threads, and so do the programs that tests start.
    OpenMP threads spin while they wait for one another. With more threads than cores, a training
    run in a test took six times as long, and starved the other tests.

    Raises:
        UsageError: The grader is not loaded, because pytest ignores the course's settings.
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
    """Distribute the tests with ``by_file``'s scheduler, whatever ``--dist`` says."""
    from by_file import ByFile  # not at the top: xdist may be missing

    return ByFile(config, log)
