"""Handles that torch keeps only in C++."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import distributed as dist

Notify = Callable[[Any], dist.Work | None]


def keeping_work(notify: Notify) -> Notify:
    """Return ``Join.notify_join_context`` for a process group in Python.

    With ``join(divide_by_initial_world_size=False)``, DistributedDataParallel's reducer waits for
    the handle in ``backward()``. It keeps its C++ part alone, whose ``wait()`` never returns once
    Python has collected the rest, so the model keeps that.
    """

    @wraps(notify)
    def notify_and_keep(joinable: Any) -> dist.Work | None:
        joinable._distlab_join_work = work = notify(joinable)
        return work

    return notify_and_keep
