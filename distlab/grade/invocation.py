"""Checks of pytest's invocation before a suite is graded.

PYTEST_DONT_REWRITE: a suite that is run as a script has imported this before pytest could.
"""

import os
import re
import shlex

import pytest

from distlab import course

SETTINGS = "pyproject.toml"
# Options that only change the display; all others must be visible on the command line.
_OF_THE_DISPLAY = re.compile(
    r"-[vqsxl]+|-r\w*|--(verbose|quiet|exitfirst|showlocals|no-header|no-summary|full-trace)"
    r"|--(color|code-highlight|tb|capture|show-capture|durations|durations-min|maxfail)=\S*"
)


def check_settings(config: pytest.Config) -> None:
    """Refuse settings other than the course's.

    Raises:
        UsageError: pytest reads another settings file, or takes another folder for the course.
    """
    root = config.rootpath
    if config.inipath != root / SETTINGS or not (root / course.FILE).is_file():
        raise pytest.UsageError(
            f"the grader needs the course's own folder and {SETTINGS}, not {root} with "
            f"{config.inipath}: leave out --rootdir and -c"
        )


def check_environment() -> None:
    """Refuse options that would change a grading without appearing on the command line.

    Raises:
        UsageError: PYTEST_ADDOPTS holds more than options for the display.
    """
    options = os.environ.get("PYTEST_ADDOPTS", "")
    if not all(map(_OF_THE_DISPLAY.fullmatch, shlex.split(options))):
        raise pytest.UsageError(
            f"PYTEST_ADDOPTS={options}: with a grading suite it may hold options for the display "
            "only; give others on the command line"
        )
