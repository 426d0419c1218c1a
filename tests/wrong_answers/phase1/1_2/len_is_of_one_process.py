"""len(loader) is that of a loader which is not shared.

rejected by: test_batches_of_a_step_are_one_global_batch
phrase: the loader yields 4 batches
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
    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), start=1):
            yield batch
            if number == len(self.sampler) // self.batch_size:
                return


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
