"""Bodies for task 4.5: ranks that report, fall silent or are slow, on the tests' own clock."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from judging.calls import typed

Event = tuple[Any, ...]  # ("beat", rank, step, busy_s), ("wait", seconds) or ("poll",)
Poll = list[tuple[int, int, float, str]]  # rank by rank: rank, step, silent_s, status
STORE_S = 0.5  # timeout of a get of a missing key


class CountedStore(dist.Store):
    """A store that notes the name of each method that is called: each is one message."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.calls = dist.HashStore(), list[str]()
        self.kept.set_timeout(timedelta(seconds=STORE_S))

    def __getattribute__(self, name: str) -> Any:
        """Return a method of the kept store that notes its calls."""
        if name.startswith("_") or name in ("kept", "calls"):
            return super().__getattribute__(name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return getattr(self.kept, name)(*args, **options)

        return call


def watch_all(lesson: Any, stories: Sequence[Any]) -> list[list[Poll]]:
    """Let stories happen, each with ranks of its own; return the polls of each.

    The last poll of a story is empty if it has waited for a key that is not there.
    """
    return [_watch(lesson, *story) for story in stories]


def _watch(
    lesson: Any, num_ranks: int, events: Sequence[Event], options: dict[str, Any]
) -> list[Poll]:
    store, now_s = CountedStore(), 1000.0
    ranks = [lesson.Heartbeat(store, rank) for rank in range(num_ranks)]
    monitor = lesson.HeartbeatMonitor(store, num_ranks, clock=lambda: now_s, **options)
    polls: list[Poll] = []
    for kind, *values in events:
        if kind == "beat":
            rank, step, busy_s = values
            ranks[rank].beat(step, busy_s)
        elif kind == "wait":
            now_s += values[0]
        else:
            try:
                ranks_of_poll = typed("poll", monitor.poll(), list)
            except dist.DistStoreError:
                return [*polls, []]
            polls.append([(h.rank, h.step, h.silent_s, h.status) for h in ranks_of_poll])
    return polls


def send(lesson: Any, num_ranks: int, num_steps: int) -> dict[str, list[list[str]]]:
    """Report and poll; return the calls of the store in each report and in each poll."""
    store = CountedStore()
    ranks = [lesson.Heartbeat(store, rank) for rank in range(num_ranks)]
    monitor = lesson.HeartbeatMonitor(store, num_ranks, timeout_s=10.0, clock=lambda: 1000.0)
    calls: dict[str, list[list[str]]] = {"report": [], "poll": []}
    for step in range(num_steps):
        for rank in ranks:
            store.calls.clear()
            rank.beat(step, 0.1)
            calls["report"].append([*store.calls])
        store.calls.clear()
        monitor.poll()
        calls["poll"].append([*store.calls])
    return calls
