"""Bodies for task 1.1, and the global generators, which no task of the lesson may move."""

import inspect
import random
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from judging.calls import int_list, refusal_of

Shards = list[list[int]]  # a shard for each rank


def shards(lesson: Any, cases: list[tuple[int, int, dict[str, Any]]]) -> list[Shards]:
    """For every (samples, ranks, options), the shards by rank; other draws come in between."""
    found = []
    for num_samples, num_ranks, options in cases:
        by_rank = []
        for rank in range(num_ranks):
            torch.rand(rank + 1), np.random.rand(rank + 1), random.random()
            by_rank.append(_shard(lesson, num_samples, rank, num_ranks, options))
        found.append(by_rank)
    return found


def own_shard(lesson: Any, num_samples: int, options: dict[str, Any]) -> list[int]:
    """The shard of the rank that calls, in a world of several."""
    return _shard(lesson, num_samples, dist.get_rank(), dist.get_world_size(), options)


def _shard(
    lesson: Any, num_samples: int, rank: int, num_ranks: int, options: dict[str, Any]
) -> list[int]:
    shard = lesson.shard_indices(num_samples, rank, num_ranks, **options)
    return int_list("shard_indices", shard)


def shards_refused(
    lesson: Any, cases: list[tuple[int, int, int, dict[str, Any]]]
) -> list[dict[str, str]]:
    return [
        refusal_of(lambda case=case, options=options: lesson.shard_indices(*case, **options))  # type: ignore[misc]
        for *case, options in cases
    ]


def shard_by_process(lesson: Any, options: dict[str, Any]) -> list[list[int]]:
    """The order that two processes find: ``hash`` of a text differs between them."""
    names, found = inspect.unwrap(lesson.shard_indices).__globals__, []
    for salt in (1, 2):
        names["hash"] = partial(_salted_hash, salt)
        found.append(_shard(lesson, 50, 0, 1, options))
    return found


def _salted_hash(salt: int, value: Any) -> int:
    return hash((salt, value)) if _holds_text(value) else hash(value)


def _holds_text(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(map(_holds_text, value))
    return isinstance(value, str | bytes)


def peak_of_shard(lesson: Any, num_samples: int, rank: int, num_ranks: int) -> int:
    """The most bytes that Python and numpy held at once during the call."""
    tracemalloc.start()
    try:
        lesson.shard_indices(num_samples, rank, num_ranks)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Generators:
    """The global generators, as they are when this is made."""

    def __init__(self) -> None:
        self.states = {
            "random": random.getstate(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }

    def moved(self) -> set[str]:
        """Name those that have been moved, or seeded, since."""
        return {name for name, state in Generators().states.items() if state != self.states[name]}


def _numpy_state() -> tuple[Any, ...]:
    """Numbers and place: a draw moves the place alone, until the numbers are used up."""
    _, numbers, *place = np.random.get_state()
    return numbers.tobytes(), *place  # type: ignore[union-attr]


def generators_moved(lesson: Any, cases: list[dict[str, Any]]) -> list[list[str]]:
    """For every case, name the global generators that a call has moved or seeded."""
    found = []
    for options in cases:
        torch.rand(3), np.random.rand(3), random.random()  # a seed alone does not tell the place
        before = Generators()
        lesson.shard_indices(10, 0, 2, **options)
        found.append(sorted(before.moved()))
    return found
