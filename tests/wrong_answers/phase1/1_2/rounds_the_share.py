"""64 // 3 = 21 trains with a batch of 63 that nobody chose.

rejected by: test_a_batch_that_cannot_be_shared_is_refused
phrase: should be a ValueError that names 63 and 66
"""

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from solutions.phase1_data_parallel.data_loader import Sample, ShardLoader, ShardSampler


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
    loader = ShardLoader(
        dataset,
        batch_size=max(1, global_batch_size // world_size),
        sampler=ShardSampler(len(dataset), rank, world_size, seed=seed, shuffle=shuffle),
        drop_last=True,
        num_workers=num_loader_workers,
        generator=torch.Generator(),
    )
    loader.set_epoch(0)
    return loader
