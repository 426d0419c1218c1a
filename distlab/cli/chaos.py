"""`distlab chaos`: kill trainings and damage checkpoints, and see whether anything is lost."""

from typing import Annotated, Literal

import typer

from distlab.cli.streams import complain


def chaos(
    kills: Annotated[
        int, typer.Option("--kills", min=0, help="How often a training process is killed.")
    ] = 200,
    corruptions: Annotated[
        int, typer.Option("--corruptions", min=0, help="How often a checkpoint is damaged.")
    ] = 1000,
    impl: Annotated[
        Literal["solution", "mine"],
        typer.Option("--impl", help="Whose checkpoints; mine: what you wrote for 4.1."),
    ] = "solution",
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Kill trainings at random moments and damage checkpoints; nothing may be lost."""
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
