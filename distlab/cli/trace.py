"""`distlab trace`: a picture of who sends what when."""

from typing import Annotated

import typer

from distlab.cli.learn import OneTask, waiting
from distlab.launch import nursery
from distlab.learner import folder, grading, programs


def trace(
    task: OneTask,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="2 to 8.  [default: 4 or 8, by task]")
    ] = None,
    impl: Annotated[
        str, typer.Option("--impl", metavar="template|solution|DIR", help="Whose function.")
    ] = "template",
) -> None:
    """Run your function on simulated ranks; draw its messages, or report the deadlock."""
    here = folder.find()
    listed, choice = here.task(task), grading.find_impl(impl)
    programs.find(listed.id)  # before anything is loaded
    with waiting(f"running {listed.function} …"):
        nursery.start_ahead()
        from distlab.learner import trace as tracing

        traced = tracing.trace(here, listed, choice, ranks)
    typer.echo(traced.text)
    if traced.picture is None:
        raise typer.Exit(1)
    typer.echo(f"\n{traced.picture.relative_to(here.root)}: who did what when")
