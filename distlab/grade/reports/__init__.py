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
        UsageError: there is no such format, no path, or nothing can be written there.
    """
    chosen = []
    for option in options:
        name, _, path = option.partition("=")
        if name not in FORMATS or not path:
            raise pytest.UsageError(
                f"--report {option}: write FORMAT=PATH with one of {', '.join(FORMATS)}"
            )
        _make_ready(Path(path), option)
        chosen.append((name, Path(path)))
    return chosen


def _make_ready(path: Path, option: str) -> None:
    """Remove an earlier run's report: should this one fail, it must not pass for its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if path.is_file():
            path.unlink()
    except OSError as error:
        raise pytest.UsageError(f"--report {option}: cannot be written: {error.strerror}") from None


def write(result: GradeResult, chosen: Sequence[tuple[str, Path]]) -> None:
    """Write every report that was asked for."""
    for name, path in chosen:
        path.write_text(FORMATS[name](result), encoding="utf-8", errors="replace")
