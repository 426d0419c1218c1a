"""Run a function on every rank of a ``torch.distributed`` world: one result per rank, or one error.

    from distlab import launch

    def hello() -> str:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    launch.run(hello, 4)     # ['rank 0 of 4', 'rank 1 of 4', 'rank 2 of 4', 'rank 3 of 4']

``errors`` is the list of everything that can go wrong.
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

_HOMES = {
    "api": ("run", "simulate"),
    "errors": (
        *("LaunchError", "RankCrashed", "RankExited", "RankFailed", "RankFate", "RankHung"),
        *("RankOutOfMemory", "SetupError"),
    ),
    "limits": ("Limits",),
    "world": ("Context", "context"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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
    """Import on first use: a fork server can be started before torch is imported here."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
