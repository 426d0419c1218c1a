"""Run bodies inside a group in which every member's rank differs from its global rank."""

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distlab.util.tracebacks import CALL

MEMBERS = (1, 2, 4)
OUTER_WORLD_SIZE = 5
WRONG_RANK = r"Invalid (destination|source) rank|not part of group"
WRONG_NAME = r"unexpected keyword argument '(group_)?(src|dst|peer)'"


def inside_group(lesson: Any, body: Callable[..., Any], *args: object) -> Any:
    """Call ``body(lesson, *args, group=…)`` on the members; the others do nothing.

    Raises:
        ValueError: Torch refuses a rank; the text explains how a group numbers its ranks.
        TypeError: A rank is passed by a wrong keyword; the text lists the right ones.
    """
    group = dist.new_group(list(MEMBERS))
    if dist.get_rank() not in MEMBERS:
        return None
    try:
        return body(lesson, *args, group=group)
    except ValueError as error:
        if re.search(WRONG_RANK, str(error)):
            raise ValueError(_which_numbers(group)) from error
        raise
    except TypeError as error:
        if re.search(WRONG_NAME, str(error)):
            raise TypeError(f"{error}. {RANK_NAMES}") from error
        setattr(error, CALL, f"{getattr(error, CALL, 'the call')} {INSIDE}")
        raise
    except LookupError as error:
        setattr(error, CALL, f"{getattr(error, CALL, 'the call')} {_where(group)}")
        raise


INSIDE = (
    f"inside the group {list(MEMBERS)} of {OUTER_WORLD_SIZE} ranks, where ranks are given by "
    "group_src= and group_dst="
)


def _where(group: Any) -> str:
    return (
        f"inside the group {list(MEMBERS)} of {OUTER_WORLD_SIZE} ranks, where rank "
        f"{dist.get_rank()} of the world is rank {dist.get_rank(group)}, as "
        "dist.get_rank(group) says"
    )


def _which_numbers(group: Any) -> str:
    return (
        f"a send or recv names the wrong rank. The group contains {list(MEMBERS)} of "
        f"{OUTER_WORLD_SIZE} ranks: rank {dist.get_rank()} of the world is {dist.get_rank(group)} "
        "in the group. dst= and src= take ranks in the world, group_dst= and group_src= in the "
        "group"
    )


RANK_NAMES = (
    "For ranks inside a group, send and isend take group_dst=, recv and irecv take group_src=, "
    "P2POp takes group_peer=, and your broadcast takes src="
)
STUCK_IN_GROUP = (
    f"The group is {list(MEMBERS)} of {OUTER_WORLD_SIZE} ranks: give group= to every call, and "
    "name ranks by group_dst=, group_src= or group_peer=, which take ranks in the group."
)
