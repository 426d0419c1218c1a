"""Reports for machines, all made from one ``GradeResult``."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from distlab.grade.reports import gradescope, json_report, junit, markdown
from distlab.grade.results import GradeResult

FORMATS: dict[str, Callable[[GradeResult], str]] = {
    "json": json_report.text,
    "junit": junit.text,
    "gradescope": gradescope.text,
    "markdown": markdown.text,
}


def parse(options: Sequence[str]) -> list[tuple[str, Path]]:
    """Read ``FORMAT=PATH`` options; a format may come several times.

    Raises:
        UsageError: there is no such format, or no path.
    """
    chosen = []
    for option in options:
        name, _, path = option.partition("=")
        if name not in FORMATS or not path:
            raise pytest.UsageError(
                f"--report {option}: write FORMAT=PATH with one of {', '.join(FORMATS)}"
            )
        chosen.append((name, Path(path)))
    return chosen


def write(result: GradeResult, chosen: Sequence[tuple[str, Path]]) -> None:
    """Write every report that was asked for."""
    for name, path in chosen:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FORMATS[name](result), encoding="utf-8", errors="replace")
