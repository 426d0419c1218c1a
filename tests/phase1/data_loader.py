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
from phase1.shards import Generators

SOURCES = ("torch", "numpy", "random")  # of augmentation
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
    """What the rank loads in each case, from a loader of its own."""
    return [_load(lesson, case, group) for case in cases]


def load_by_default(lesson: Any, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The same, without the argument ``group``."""
    return [_load(lesson, case, None, is_group_given=False) for case in cases]


def _load(lesson: Any, case: Case, group: Any, is_group_given: bool = True) -> dict[str, Any]:
    num_samples, batch, epochs, options = case
    _train()
    data, before = Numbered(num_samples), Generators()
    given = {**options, "group": group} if is_group_given else options
    loader = returned("build_loader", lesson.build_loader(data, batch, **given))
    return {
        "building": sorted(before.moved()),
        "is_shard_loader": isinstance(loader, lesson.ShardLoader),
        "class": type(loader).__name__,
        "len": len(loader),
        "epochs": [_epoch(loader, epoch, data) for epoch in epochs],
        "shards": [_shard(lesson, num_samples, epoch, options, group) for epoch in epochs],
    }


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
    """What the lesson's own 1.1 says of this rank and epoch."""
    used = {key: options[key] for key in options if key in ("seed", "shuffle")}
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shard = lesson.shard_indices(
        num_samples, rank, world_size, epoch=max(epoch, 0), drop_last=True, **used
    )
    return [int(index) for index in shard]


def loads_refused(
    lesson: Any, cases: Sequence[tuple[int, int]], group: Any = None
) -> list[dict[str, str]]:
    """For every (samples, global batch), what ``build_loader`` raises."""
    return [
        refusal_of(lambda n=n, batch=batch: lesson.build_loader(Numbered(n), batch, group=group))  # type: ignore[misc]
        for n, batch in cases
    ]
