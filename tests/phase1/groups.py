"""Bodies inside a group that is not 0 … k: every rank but the last has another number in it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

MEMBERS = (1, 2, 4)
OUTER_WORLD_SIZE = 5


def inside_group(lesson: Any, body: Callable[..., Any], *args: object) -> Any:
    """Call ``body(lesson, *args, group=…)`` on the members; the others do nothing."""
    group = dist.new_group(list(MEMBERS))
    return body(lesson, *args, group=group) if dist.get_rank() in MEMBERS else None


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the ValueError that ``call`` raises, "" if it raises none."""
    try:
        call()
    except ValueError as error:
        return f"ValueError: {error}"
    return ""
