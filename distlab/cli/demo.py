"""`distlab demo`: one worker, then four, on real images, and the proof that they learn the same."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the picture.")] = Path("out"),
) -> None:
    """Train a CNN on real images with 1 and with 4 workers, and compare. Under a minute."""
    from distlab import demo as comparison

    comparison.run_demo(out)
