"""Bodies for task 4.5: ranks that report, fall silent or are slow, on a clock of the test's own."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from judging.calls import typed

Event = tuple[Any, ...]  # ("beat", rank, step, busy_s), ("wait", seconds) or ("poll",)
STORE_S = 0.5  # get of what is not there: an error after that


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def watch(
    lesson: Any, num_ranks: int, events: Sequence[Event], options: dict[str, Any]
) -> list[list[tuple[int, int, float, str]]]:
    """Let events happen one after the other.

    Returns:
        What each poll tells; the last one nothing, if it has waited for a key that is not there.
    """
    store, clock = dist.HashStore(), Clock()
    store.set_timeout(timedelta(seconds=STORE_S))
    ranks = [lesson.Heartbeat(store, rank) for rank in range(num_ranks)]
    monitor = lesson.HeartbeatMonitor(store, num_ranks, clock=clock, **options)
    polls = []
    for what, *values in events:
        if what == "beat":
            rank, step, busy_s = values
            ranks[rank].beat(step, busy_s)
        elif what == "wait":
            clock.now_s += values[0]
        else:
            try:
                found = typed("poll", monitor.poll(), list)
            except dist.DistStoreError:
                return [*polls, []]
            polls.append([(h.rank, h.step, round(h.silent_s, 6), h.status) for h in found])
    return polls
