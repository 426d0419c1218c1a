"""Bodies for task 4.5: ranks that report, fall silent or are slow, on the tests' own clock."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from judging.calls import typed

Event = tuple[Any, ...]  # ("beat", rank, step, busy_s), ("wait", seconds) or ("poll",)
STORE_S = 0.5  # get of what is not there: an error after that


class CountedStore(dist.Store):
    """A store that counts the messages to it: each call is one, and one answer at most."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.calls = dist.HashStore(), list[str]()
        self.kept.set_timeout(timedelta(seconds=STORE_S))

    def __getattribute__(self, name: str) -> Any:
        """Return a method of the store that is within, such that calls of it are noted."""
        if name.startswith("_") or name in ("kept", "calls"):
            return super().__getattribute__(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return getattr(self.kept, name)(*args, **options)

        return call


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
    store, clock = CountedStore(), Clock()
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


def watch_all(lesson: Any, stories: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Let stories happen, each to ranks of its own; return what the polls of each tell."""
    return [watch(lesson, num_ranks, events, options) for num_ranks, events in stories]


def send(lesson: Any, num_ranks: int, num_steps: int) -> dict[str, list[list[str]]]:
    """Report and poll; return the calls of the store in each report, and in each poll."""
    store = CountedStore()
    ranks = [lesson.Heartbeat(store, rank) for rank in range(num_ranks)]
    monitor = lesson.HeartbeatMonitor(store, num_ranks, timeout_s=10.0, clock=Clock())
    reports, polls = [], []
    for step in range(num_steps):
        for rank in ranks:
            store.calls.clear()
            rank.beat(step, 0.1)
            reports.append([*store.calls])
        store.calls.clear()
        monitor.poll()
        polls.append([*store.calls])
    return {"reports": reports, "polls": polls}
