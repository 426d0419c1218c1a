"""distlab: the support package of the course. docs/architecture.md says what each part is for."""

from collections.abc import Callable
from typing import Any

_ends: dict[Any, Callable[[], None]] = {}  # for each shell, what ends its ranks


def load_ipython_extension(shell: Any) -> None:
    """Add ``%cluster`` and its like to a notebook: ``%load_ext distlab``."""
    import atexit

    from distlab.notebook.shell import load

    _ends[shell] = end = load(shell)
    atexit.register(end)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks of a notebook."""
    import atexit

    end = _ends.pop(shell)
    atexit.unregister(end)
    end()
