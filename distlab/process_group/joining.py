"""Handles that torch keeps only in C++."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed as dist

_kept: WeakKeyDictionary[Any, dist.Work] = WeakKeyDictionary()  # by the model that joins
Notify = Callable[[Any], dist.Work | None]


def keeping_work(notify: Notify) -> Notify:
    """Return ``Join.notify_join_context`` for a process group in Python.

    With ``join(divide_by_initial_world_size=False)``, DistributedDataParallel's reducer waits for
    the handle in ``backward()``. It keeps its C++ part alone, whose ``wait()`` never returns once
    Python has collected the rest, so that is kept until the model's next step.
    """

    @wraps(notify)
    def notify_and_keep(joinable: Any) -> dist.Work | None:
        work = notify(joinable)
        if work is not None:
            _kept[joinable] = work
        return work

    return notify_and_keep
