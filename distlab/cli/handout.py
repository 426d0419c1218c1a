"""`distlab handout`: the course as students get it."""

from pathlib import Path
from typing import Annotated

import typer

from distlab.learner import folder
from distlab.learner import handout as handouts


def handout(
    target: Annotated[
        Path,
        typer.Argument(metavar="DIR", show_default=False, help="A new folder outside the course."),
    ],
) -> None:
    """Write the students' version of the course: no solutions, no wrong answers, no .git."""
    count = handouts.write(folder.find(), target)
    typer.echo(f"{target}: {count} files, without solutions. There: make setup, then distlab")
