"""The incomplete global batch at the end is loaded too, and ranks have unequal shares of it.

rejected by: test_the_number_of_ranks_does_not_change_the_global_batches
phrase: the incomplete last batch is left out
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from solutions.phase1_data_parallel.data_loader import (
    Sample,
    ShardLoader,
    ShardSampler,
    _equal_share,
    shard_indices,
)


class Keeping(ShardSampler):
    def __iter__(self) -> Iterator[int]:
        order = shard_indices(
            self.num_samples, 0, 1, epoch=self.epoch, seed=self.seed, shuffle=self.shuffle
        )
        return iter(order[self.rank :: self.world_size])

    def __len__(self) -> int:
        return len(range(self.rank, self.num_samples, self.world_size))


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
    loader = ShardLoader(
        dataset,
        batch_size=_equal_share(global_batch_size, n, len(dataset)),
        sampler=Keeping(len(dataset), rank, n, seed=seed, shuffle=shuffle),
        num_workers=num_loader_workers,
        generator=torch.Generator(),
    )
    loader.set_epoch(0)
    return loader
