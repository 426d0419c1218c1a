"""Run a function on every rank of a ``torch.distributed`` world: one result per rank, or one error.

    from distlab import launch

    def hello() -> str:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    launch.run(hello, 4)     # ['rank 0 of 4', 'rank 1 of 4', 'rank 2 of 4', 'rank 3 of 4']

``errors`` is the list of everything that can go wrong.
"""

from distlab.launch.api import run, simulate
from distlab.launch.errors import (
    LaunchError,
    RankCrashed,
    RankExited,
    RankFailed,
    RankHung,
    RankOutOfMemory,
    SetupError,
)
from distlab.launch.world import Context, context

__all__ = [
    "Context",
    "LaunchError",
    "RankCrashed",
    "RankExited",
    "RankFailed",
    "RankHung",
    "RankOutOfMemory",
    "SetupError",
    "context",
    "run",
    "simulate",
]
