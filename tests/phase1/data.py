"""Bodies (functions that ranks run) for tasks 1.1 and 1.2.

Some of them record whether the lesson advances or seeds the global random generators.
"""

import inspect
import os
import random
import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from distlab.grade import WrongResult
from judging.calls import int_list, refused, returned
from judging.tensors import given_group

Shards = list[list[int]]  # one shard per rank


def shards(lesson: Any, cases: list[tuple[int, int, dict[str, Any]]]) -> list[Shards]:
    """Return every rank's shard for each case, a tuple of (samples, ranks, options).

    Between the calls, numbers are drawn from the global random generators.
    """
    found = []
    for num_samples, num_ranks, options in cases:
        by_rank = []
        for rank in range(num_ranks):
            torch.rand(rank + 1), np.random.rand(rank + 1), random.random()
            by_rank.append(_shard(lesson, num_samples, rank, num_ranks, options))
        found.append(by_rank)
    return found


def own_shard(lesson: Any, num_samples: int, options: dict[str, Any]) -> list[int]:
    """Return this rank's shard, with the rank and the number of ranks taken from the world."""
    return _shard(lesson, num_samples, dist.get_rank(), dist.get_world_size(), options)


def _shard(
    lesson: Any, num_samples: int, rank: int, num_ranks: int, options: dict[str, Any]
) -> list[int]:
    shard = lesson.shard_indices(num_samples, rank, num_ranks, **options)
    return int_list("shard_indices", shard)


def shards_refused(
    lesson: Any, cases: list[tuple[int, int, int, dict[str, Any]]]
) -> list[dict[str, str]]:
    """Return how the lesson refuses each case, a tuple of (samples, rank, ranks, options)."""
    return [refused(lesson, "shard_indices", *case, **options) for *case, options in cases]


def shard_by_process(lesson: Any, options: dict[str, Any]) -> list[list[int]]:
    """Return the order of 50 samples for each of two salts of ``hash``, as if in two processes."""
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
    """Return the peak memory, in bytes, that Python and numpy allocate in ``shard_indices``."""
    tracemalloc.start()
    try:
        lesson.shard_indices(num_samples, rank, num_ranks)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Generators:
    """A snapshot of the global random generators."""

    def __init__(self) -> None:
        self.states = {
            "random": random.getstate(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }

    def moved(self) -> set[str]:
        """Return the names of generators that were advanced or seeded after the snapshot."""
        return {name for name, state in Generators().states.items() if state != self.states[name]}


def _numpy_state() -> tuple[Any, ...]:
    """Return the state of numpy's global generator in a form that can be compared."""
    _, numbers, *place = np.random.get_state()
    return numbers.tobytes(), *place  # type: ignore[union-attr]


def generators_moved(lesson: Any, cases: list[dict[str, Any]]) -> list[list[str]]:
    """Return, for each case, the global generators that ``shard_indices`` advances or seeds."""
    found = []
    for options in cases:
        # Draw from each generator, so that reseeding it would change its state.
        torch.rand(3), np.random.rand(3), random.random()
        before = Generators()
        lesson.shard_indices(10, 0, 2, **options)
        found.append(sorted(before.moved()))
    return found


SOURCES = ("torch", "numpy", "random")  # random generators used by augmentation
Case = tuple[int, int, list[int], dict[str, Any]]  # samples, global batch, epochs, options


class Numbered(Dataset[tuple[Tensor, int]]):
    """A data set whose sample k consists of k, a random number per source, and the process id.

    Attributes:
        fetched: The indices of the samples that this process has fetched, in order.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.fetched.append(index)
        noise = float(torch.rand((), dtype=torch.float64)), float(np.random.rand()), random.random()
        return torch.tensor([*noise, float(os.getpid())], dtype=torch.float64), index


def load(lesson: Any, cases: Sequence[Case], group: Any = None) -> list[dict[str, Any]]:
    """Load the epochs of each case on this rank, with a new loader for each case."""
    return [_load(lesson, case, group) for case in cases]


def _load(lesson: Any, case: Case, group: Any) -> dict[str, Any]:
    num_samples, batch, epochs, options = case
    _train()
    data, before = Numbered(num_samples), Generators()
    loader = _loader(lesson, data, batch, **options, **given_group(group))
    return {
        "building": sorted(before.moved()),
        "len": len(loader),
        "epochs": [_epoch(loader, epoch, data) for epoch in epochs],
        "shards": [
            _shard_of_rank(lesson, num_samples, epoch, options, group) for epoch in last_set(epochs)
        ],
    }


def _loader(lesson: Any, data: Numbered, batch: int, **options: Any) -> Any:
    loader = returned("build_loader", lesson.build_loader(data, batch, **options))
    if not isinstance(loader, lesson.ShardLoader):
        kind = type(loader).__name__
        raise WrongResult(f"build_loader should return a ShardLoader; it returned a {kind}.")
    return loader


def offers(lesson: Any, option: str) -> bool:
    """Return whether build_loader has an option; answers to an earlier contract may lack it."""
    return option in inspect.signature(lesson.build_loader).parameters


def pinned(lesson: Any) -> list[list[bool]]:
    """Return, for a host with a GPU and one without, if a loader pins: by default, and if told."""
    found = []
    for has_gpu in (True, False):
        with (
            patch.object(torch.cuda, "is_available", return_value=has_gpu),
            patch.object(torch.accelerator, "is_available", return_value=has_gpu),
        ):
            loaders = [_loader(lesson, Numbered(4), 4, **o) for o in ({}, {"pin_memory": True})]
        found.append([bool(loader.pin_memory) for loader in loaders])
    return found


def last_set(epochs: Sequence[int]) -> list[int]:
    """Return the epoch that the loader is in for each entry of ``epochs``.

    An entry of -1 keeps the previous epoch, which is 0 at first.
    """
    return [max([0, *[e for e in epochs[: i + 1] if e >= 0][-1:]]) for i, _ in enumerate(epochs)]


def _train() -> None:
    """Draw from the global generators, as dropout does."""
    torch.rand(3), np.random.rand(3), random.random()


def _epoch(loader: Any, epoch: int, data: Numbered) -> dict[str, Any]:
    """Load one epoch; return what was observed. If ``epoch`` is -1, do not call ``set_epoch``."""
    before = Generators()
    if epoch >= 0:
        loader.set_epoch(epoch)
    set_epoch, loading = before.moved(), set()
    before, images, steps = Generators(), [], []
    for batch, labels in loader:
        loading |= before.moved()
        images.append(batch)
        steps.append([int(label) for label in labels])
        _train()
        before = Generators()
    # For the first epoch, ``fetched`` includes samples fetched while building the loader.
    fetched, data.fetched = data.fetched, []
    *noise, processes = torch.cat(images).T.tolist() if images else [[]] * 4
    return {
        "steps": steps,
        "noise": dict(zip(SOURCES, noise, strict=True)),
        "others": sorted({int(process) for process in processes} - {os.getpid()}),
        "is_own": os.getpid() in map(int, processes),
        "fetched": fetched,
        "set_epoch": sorted(set_epoch),
        "loading": sorted(loading | before.moved()),
    }


def _shard_of_rank(
    lesson: Any, num_samples: int, epoch: int, options: dict[str, Any], group: Any
) -> list[int]:
    """Return this rank's shard of an epoch, computed by the lesson's own ``shard_indices``."""
    used = {key: options[key] for key in options if key in ("seed", "shuffle")}
    place = dist.get_rank(group), dist.get_world_size(group)
    shard = lesson.shard_indices(num_samples, *place, epoch=epoch, drop_last=True, **used)
    return [int(index) for index in shard]


def loads_refused(lesson: Any, cases: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
    """Return how the lesson refuses each case, a tuple of (samples, global batch)."""
    return [refused(lesson, "build_loader", Numbered(n), batch) for n, batch in cases]
