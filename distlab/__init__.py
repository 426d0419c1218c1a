"""distlab: the support package of the course. docs/architecture.md says what each part is for."""

from typing import Any

_loaded: list[Any] = []  # functions that end what the extension has added to a shell


def load_ipython_extension(shell: Any) -> None:
    """Add ``%cluster`` and its like to a notebook: ``%load_ext distlab``."""
    import atexit

    from distlab.notebook.shell import load

    end = load(shell)
    atexit.register(end)
    _loaded.append(end)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks of a notebook."""
    while _loaded:
        _loaded.pop()()
