"""Helpers that run functions on ranks, including in a group whose members are not ranks 0 … k."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distlab import launch

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
TIMEOUT_S = 60.0

# A group inside a world of five, in which no member's group rank equals its global rank.
OUTER_WORLD_SIZE = 5
MEMBERS = (1, 2, 4)


def on_ranks(
    call: Callable[..., Any], world_size: int, *args: object, **settings: Any
) -> list[Any]:
    """Call ``launch.run`` with a time limit."""
    return launch.run(call, world_size, *args, timeout_s=TIMEOUT_S, **settings)


def on_members(call: Callable[..., Any], *args: object) -> list[Any]:
    """Return the results of ``call(*args, group=…)`` on ``MEMBERS``; other ranks do nothing."""
    results = on_ranks(_inside_group, OUTER_WORLD_SIZE, call, *args)
    return [results[member] for member in MEMBERS]


def _inside_group(call: Callable[..., Any], *args: object) -> Any:
    group = dist.new_group(list(MEMBERS))
    return call(*args, group=group) if dist.get_rank() in MEMBERS else None


def refusal(call: Callable[[], object]) -> str:
    """Return the text of the ValueError that ``call`` raises."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no ValueError"
