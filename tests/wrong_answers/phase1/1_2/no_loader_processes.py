"""Works only where it loads in its own process.

rejected by: test_loader_processes_are_seeded_too
phrase: num_workers was never tried
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from solutions.phase1_data_parallel.data_loader import (
    Sample,
    ShardLoader,
    ShardSampler,
    _equal_share,
)


class Loader(ShardLoader):
    def __iter__(self):
        if self.num_workers:
            raise RuntimeError("num_workers was never tried")
        return super().__iter__()


def build_loader(
    dataset: Dataset[Sample],
    global_batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_loader_workers: int = 0,
    group: dist.ProcessGroup | None = None,
) -> DataLoader[Sample]:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    loader = Loader(
        dataset,
        batch_size=_equal_share(global_batch_size, n, len(dataset)),
        sampler=ShardSampler(len(dataset), rank, n, seed=seed, shuffle=shuffle),
        drop_last=True,
        num_workers=num_loader_workers,
        generator=torch.Generator(),
    )
    loader.set_epoch(0)
    return loader
