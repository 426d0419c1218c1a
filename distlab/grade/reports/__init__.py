"""Reports for machines, all made from one ``GradeResult``."""

from collections.abc import Callable, Sequence
from pathlib import Path

from distlab.grade import report_paths
from distlab.grade.reports import gradescope, json_report, junit, markdown
from distlab.grade.results import GradeResult

FORMATS: dict[str, Callable[[GradeResult], str]] = {
    "json": json_report.text,
    "junit": junit.text,
    "gradescope": gradescope.text,
    "markdown": markdown.text,
}


def write(result: GradeResult, chosen: Sequence[tuple[str, Path]]) -> None:
    """Write every report that was asked for.

    Raises:
        OSError: A report cannot be written; the others are written.
    """
    problem: OSError | None = None
    for name, path in chosen:
        try:
            report_paths.write(path, FORMATS[name](result))
        except OSError as error:
            problem = error
    if problem:
        raise problem
