"""distlab: the support package of the course. docs/architecture.md says what each part is for."""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Add ``%cluster`` and its like to a notebook: ``%load_ext distlab``."""
    import atexit

    from distlab.notebook.magics import load

    atexit.register(load(shell))
