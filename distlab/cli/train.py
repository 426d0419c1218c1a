"""`distlab train`: the trainer; its options are the keys of a configuration."""

from typing import Annotated

import typer


def train(
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--config FILE] [--KEY VALUE]",
            show_default=False,
            help="distlab train --help lists them.",
        ),
    ] = None,
) -> None:
    """Train a model with everything that the course builds, on CPUs, GPUs or simulated ones."""
    from distlab.production.launching import launch

    raise typer.Exit(launch(options or []))
