"""`distlab trace`: a picture of who sends what, and when."""

from typing import Annotated

import typer

from distlab.cli.learn import impl_option, task_argument, waiting
from distlab.course import HANG
from distlab.launch import fork_server
from distlab.learner import folder, grading, source, state, status, trace_programs


def trace(
    task: Annotated[
        str | None, task_argument("By default the last one graded, or the next one.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="From 2 to 8.  [default: 4 or 8, by task]")
    ] = None,
    impl: Annotated[str, impl_option("Whose function to run.")] = "template",
) -> None:
    """Run a function of Phase 1 on simulated ranks; draw its messages, or report a deadlock."""
    here = folder.find()
    listed, why = (here.task(task), "") if task else trace_programs.choose(here, state.load(here))
    handed_in = grading.find_submission(here, impl)
    count = trace_programs.count(listed.id, ranks)  # checked before torch is loaded
    if impl == "template" and source.is_to_write(here, listed):
        typer.echo(status.not_written(listed))
        raise typer.Exit(1)
    if why:
        typer.echo(f"{listed.id} {listed.label}, {why}:")
    with waiting(f"running {listed.label} …"):
        fork_server.start_ahead()
        from distlab.learner import trace as tracing

        traced = tracing.trace(here, listed, handed_in, count)
    typer.echo(traced.text)
    if traced.picture is None:
        raise typer.Exit(1)
    if state.load(here).outcome(listed) == HANG:
        typer.echo("It does not hang here, on any rank: the tests hang in another case.")
    typer.echo(f"\n{traced.picture.relative_to(here.root)}: who did what when")
