"""set_epoch seeds the generators that dropout draws from, and augmentation moves them.

rejected by: test_loading_takes_no_numbers_from_the_training
phrase: global generator of numpy and random and torch
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from solutions.phase1_data_parallel.data_loader import Sample, ShardSampler, _equal_share


class Loader(DataLoader[Sample]):
    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        seed = hash((self.sampler.seed, epoch, self.sampler.rank)) % 2**32
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


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
    )
    loader.set_epoch(0)
    return loader
