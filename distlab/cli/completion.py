"""`distlab completion`: tab completion of commands, options and tasks."""

import os
from typing import Annotated, Literal

import typer
from typer.completion import (  # type: ignore[attr-defined]  # public, but not in an __all__
    completion_init,
    get_completion_script,
)

from distlab.course import CourseError
from distlab.learner import folder

VARIABLE = "_DISTLAB_COMPLETE"  # set by the completion script when the shell asks for completions
Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[Shell, typer.Argument(show_default=False, help="bash, zsh or fish.")],
) -> None:
    """Print a script for tab completion, including tasks; docs/install.md says where to put it."""
    typer.echo(get_completion_script(prog_name="distlab", complete_var=VARIABLE, shell=shell))


def prepare() -> None:
    """Prepare typer to answer if the shell asks for completions."""
    if VARIABLE in os.environ:
        completion_init()


def tasks(incomplete: str) -> list[tuple[str, str]]:
    """Return the task ids and function names that begin with this text, with their titles."""
    try:
        listed = folder.find().course.tasks
    except (folder.LearnerError, CourseError):
        return []
    by_id = [(task.id, task.title) for task in listed]
    by_name = [(name, task.heading) for task in listed for name in task.names]
    names = [*by_id, *by_name] if incomplete else by_id
    return [(name, text) for name, text in names if name.startswith(incomplete)]
