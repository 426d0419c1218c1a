"""`distlab demo`, `doctor`, `handout`, `hang` and `chaos`: commands that only call one function."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from distlab.cli.streams import complain
from distlab.learner import folder
from distlab.learner import handout as handouts


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
) -> None:
    """Train a CNN on real images with 1 and with 4 workers, and compare. Takes under a minute."""
    from distlab import demo as comparison

    comparison.run_demo(out)


def doctor() -> None:
    """Check what is installed and which worlds run here."""
    from distlab import doctor as checks

    if not checks.print_report():
        raise typer.Exit(1)


def handout(
    target: Annotated[
        Path,
        typer.Argument(metavar="DIR", show_default=False, help="A new folder outside the course."),
    ],
) -> None:
    """Write the students' version of the course: no solutions, no wrong answers, no .git."""
    count = handouts.write(folder.find(), target)
    typer.echo(f"{target}: {count} files, without solutions. There: make setup, then distlab")


def hang(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", show_default=False, help="The run_dir of a training."),
    ],
) -> None:
    """Show where the ranks of a training were that hung, and which ranks waited for which."""
    from distlab.production import hang_report

    try:
        typer.echo(hang_report.report(run_dir))
    except (hang_report.NoEvidenceError, OSError) as error:
        raise typer.Exit(complain(f"distlab hang: {error}", 1)) from None


def chaos(
    kills: Annotated[
        int, typer.Option(min=0, help="How often a training process is killed.")
    ] = 200,
    corruptions: Annotated[
        int, typer.Option(min=0, help="How often a checkpoint is damaged.")
    ] = 1000,
    impl: Annotated[
        Literal["solution", "mine"],
        typer.Option(help="Whose checkpoints; mine: what you wrote for 4.1."),
    ] = "solution",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Kill training runs at random moments, damage checkpoints, and check that nothing is lost."""
    from distlab.chaos import campaigns
    from distlab.chaos.kills import CampaignError

    try:
        failures = campaigns.run(kills, corruptions, impl, seed)
    except CampaignError as error:
        failures = [str(error)]
    for failure in failures:
        complain(f"distlab chaos: {failure}", 1)
    if failures:
        raise typer.Exit(1)
