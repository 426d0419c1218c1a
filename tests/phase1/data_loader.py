"""Bodies for task 1.2."""

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from judging.calls import refusal_of, returned
from judging.tensors import given_group
from phase1.shards import Generators

SOURCES = ("torch", "numpy", "random")  # sources of augmentation
Case = tuple[int, int, list[int], dict[str, Any]]  # samples, global batch, epochs, options


class Numbered(Dataset[tuple[Tensor, int]]):
    """Sample k is the number k, a random number from each source, and the process that made it.

    Attributes:
        fetched: the numbers of the samples that this process has made.
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
    """Load each case on this rank, from a new loader."""
    return [_load(lesson, case, group) for case in cases]


def _load(lesson: Any, case: Case, group: Any) -> dict[str, Any]:
    num_samples, batch, epochs, options = case
    _train()
    data, before = Numbered(num_samples), Generators()
    given = given_group(group)
    loader = returned("build_loader", lesson.build_loader(data, batch, **options, **given))
    return {
        "building": sorted(before.moved()),
        "type": type(loader).__name__ if not isinstance(loader, lesson.ShardLoader) else "",
        "len": len(loader),
        "epochs": [_epoch(loader, epoch, data) for epoch in epochs],
        "shards": [
            _shard(lesson, num_samples, epoch, options, group) for epoch in last_set(epochs)
        ],
    }


def last_set(epochs: Sequence[int]) -> list[int]:
    """The epochs that a loader is in: -1 stays in the epoch before it, at first in epoch 0."""
    return [max([0, *[e for e in epochs[: i + 1] if e >= 0][-1:]]) for i, _ in enumerate(epochs)]


def _train() -> None:
    """Draw from the global generators, as dropout does."""
    torch.rand(3), np.random.rand(3), random.random()


def _epoch(loader: Any, epoch: int, data: Numbered) -> dict[str, Any]:
    """Load one epoch; -1: without ``set_epoch``."""
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
    fetched, data.fetched = data.fetched, []  # in the first epoch, while building too
    *noise, processes = torch.cat(images).T.tolist() if images else [[]] * 4
    return {
        "steps": steps,
        "noise": dict(zip(SOURCES, noise, strict=True)),
        "others": len({int(process) for process in processes} - {os.getpid()}),
        "is_own": os.getpid() in map(int, processes),
        "fetched": fetched,
        "set_epoch": sorted(set_epoch),
        "loading": sorted(loading | before.moved()),
    }


def _shard(
    lesson: Any, num_samples: int, epoch: int, options: dict[str, Any], group: Any
) -> list[int]:
    """Return the shard of this rank and epoch by the lesson's own 1.1."""
    used = {key: options[key] for key in options if key in ("seed", "shuffle")}
    place = dist.get_rank(group), dist.get_world_size(group)
    shard = lesson.shard_indices(num_samples, *place, epoch=epoch, drop_last=True, **used)
    return [int(index) for index in shard]


def loads_refused(lesson: Any, cases: Sequence[tuple[int, int]]) -> list[dict[str, str]]:
    """For every (samples, global batch), what ``build_loader`` raises."""
    return [
        refusal_of(lambda n=n, batch=batch: lesson.build_loader(Numbered(n), batch))  # type: ignore[misc]
        for n, batch in cases
    ]
