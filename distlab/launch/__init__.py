"""Run a function on all ranks of a ``torch.distributed`` world; return results or raise an error.

    from distlab import launch

    def hello() -> str:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    launch.run(hello, 4)     # ['rank 0 of 4', 'rank 1 of 4', 'rank 2 of 4', 'rank 3 of 4']

``errors`` lists everything that can go wrong.

    world         the ranks of one call, which share a process group and a folder
    rank          one process of a world; the parent sees its messages, its output and its exit
    fork server   a process with torch loaded, from which ranks are forked
    supervisor    watches a world from the parent: exits, output, memory and time
    place         what a rank is doing, and at which line of the program
    report        a rank's own account of how it ended, with its result
    verdict       which rank is to blame, and the one error that says so
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.launch.api import run, simulate
    from distlab.launch.errors import (
        LaunchError,
        RankCrashed,
        RankExited,
        RankFailed,
        RankFate,
        RankHung,
        RankOutOfMemory,
        SetupError,
    )
    from distlab.launch.limits import Limits
    from distlab.launch.world import Context, context

_HOMES = ("errors", "limits", "world", "api")  # in order of import time, fastest first

__all__ = [
    "Context",
    "LaunchError",
    "Limits",
    "RankCrashed",
    "RankExited",
    "RankFailed",
    "RankFate",
    "RankHung",
    "RankOutOfMemory",
    "SetupError",
    "context",
    "run",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that a fork server can start before torch is imported here."""
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
