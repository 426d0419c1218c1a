"""Asks the world who it is, inside a group.

rejected by: test_the_loader_asks_its_group
phrase: raised ValueError: rank 4 is not in
"""

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from solutions.phase1_data_parallel.data_loader import (
    Sample,
    ShardLoader,
    ShardSampler,
    _equal_share,
)


def build_loader(
    dataset: Dataset[Sample],
    global_batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_loader_workers: int = 0,
    group: dist.ProcessGroup | None = None,
) -> ShardLoader:
    rank, world_size = dist.get_rank(), dist.get_world_size(group)
    loader = ShardLoader(
        dataset,
        batch_size=_equal_share(global_batch_size, world_size, len(dataset)),
        sampler=ShardSampler(len(dataset), rank, world_size, seed=seed, shuffle=shuffle),
        drop_last=True,
        num_workers=num_loader_workers,
        generator=torch.Generator(),
    )
    loader.set_epoch(0)
    return loader
