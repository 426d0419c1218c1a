"""The generator is not seeded until somebody calls set_epoch.

rejected by: test_augmentation_differs_by_rank_and_epoch_and_can_be_repeated
phrase: put it there before you return it
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
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    return ShardLoader(
        dataset,
        batch_size=_equal_share(global_batch_size, world_size, len(dataset)),
        sampler=ShardSampler(len(dataset), rank, world_size, seed=seed, shuffle=shuffle),
        drop_last=True,
        num_workers=num_loader_workers,
        generator=torch.Generator(),
    )
