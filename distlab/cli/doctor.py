"""`distlab doctor`: what is installed, which worlds work here, and the fix for what does not."""

import typer


def doctor() -> None:
    """Check what is installed and which worlds run here."""
    from distlab import doctor as checks

    if not checks.print_report():
        raise typer.Exit(1)
