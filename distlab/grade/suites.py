"""A suite as pytest sees it: the mark that assigns a test to a task, and the checks of options.

PYTEST_DONT_REWRITE: a suite that is run as a script imports this before pytest can rewrite it.
"""

import os
import re
import shlex
from typing import Any

import pytest

from distlab import course

SETTINGS = "pyproject.toml"
# Options that change only the display; all others must be given on the command line.
_OF_THE_DISPLAY = re.compile(
    r"-[vqsxl]+|-r\w*|--(verbose|quiet|exitfirst|showlocals|no-header|no-summary|full-trace)"
    r"|--(color|code-highlight|tb|capture|show-capture|durations|durations-min|maxfail)=\S*"
)


def check_settings(config: pytest.Config) -> None:
    """Refuse settings other than the course's.

    Raises:
        UsageError: pytest uses another settings file, or a root that is not the course's folder.
    """
    root = config.rootpath
    if config.inipath != root / SETTINGS or not (root / course.FILE).is_file():
        raise pytest.UsageError(
            f"the grader needs the course's own folder and {SETTINGS}, not {root} with "
            f"{config.inipath}: leave out --rootdir and -c"
        )


def check_environment() -> None:
    """Refuse options that would affect grading without appearing on the command line.

    Raises:
        UsageError: PYTEST_ADDOPTS holds more than display options.
    """
    options = os.environ.get("PYTEST_ADDOPTS", "")
    if not all(map(_OF_THE_DISPLAY.fullmatch, shlex.split(options))):
        raise pytest.UsageError(
            f"PYTEST_ADDOPTS={options}: with a grading suite it may hold options for the display "
            "only; give others on the command line"
        )


def task(task_id: str, *, part: str = "a", real: bool = False) -> Any:
    """Mark a test as belonging to a task.

    Args:
        task_id: Id in course.toml, such as "1.4".
        part: Letter of the part that the test decides, in a task that is graded in parts.
        real: True to run the test on real processes too, after the simulated world.
    """
    return pytest.mark.task(task_id, part=part, real=real)


def task_of(item: pytest.Item) -> str | None:
    """Return the id of the task that a test belongs to."""
    mark = item.get_closest_marker("task")
    return str(mark.args[0]) if mark else None


def part_of(item: pytest.Item) -> str:
    """Return the letter of the part of its task that a test decides."""
    mark = item.get_closest_marker("task")
    return str(mark.kwargs.get("part", "a")) if mark else ""


def in_order_of_parts(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with those of each task in the order of its parts, at its first test."""
    first: dict[str | None, int] = {}
    for place, item in enumerate(items):
        first.setdefault(task_of(item) or item.nodeid, place)
    return sorted(items, key=lambda item: (first[task_of(item) or item.nodeid], part_of(item)))


def is_real_too(mark: pytest.Mark) -> bool:
    """Return True if a marked test also runs on real processes."""
    return bool(mark.kwargs.get("real"))
