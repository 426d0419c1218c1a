"""`distlab trace`: a picture of who sends what when."""

from typing import Annotated

import typer

from distlab.cli import completion
from distlab.cli.learn import waiting
from distlab.course import HANG
from distlab.launch import nursery
from distlab.learner import folder, grading, programs, source, state, status


def trace(
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK",
            show_default=False,
            help="Else the last one graded, or the next.",
            autocompletion=completion.tasks,
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="2 to 8.  [default: 4 or 8, by task]")
    ] = None,
    impl: Annotated[
        str, typer.Option("--impl", metavar="template|solution|DIR", help="Whose function.")
    ] = "template",
) -> None:
    """Run your function on simulated ranks; draw its messages, or report the deadlock."""
    here = folder.find()
    listed, why = (here.task(task), "") if task else programs.choose(here, state.load(here))
    choice = grading.find_impl(impl)
    count = programs.count(listed.id, ranks)  # before anything is loaded
    if choice == "template" and source.is_to_write(here, listed):
        typer.echo(status.not_written(listed))
        raise typer.Exit(1)
    if why:
        typer.echo(f"{listed.id} {listed.function}, {why}:")
    with waiting(f"running {listed.function} …"):
        nursery.start_ahead()
        from distlab.learner import trace as tracing

        traced = tracing.trace(here, listed, choice, count)
    typer.echo(traced.text)
    if traced.picture is None:
        raise typer.Exit(1)
    if state.load(here).outcome(listed) == HANG:
        typer.echo("It ends well here, on all ranks: what hangs is another case of the tests.")
    typer.echo(f"\n{traced.picture.relative_to(here.root)}: who did what when")
