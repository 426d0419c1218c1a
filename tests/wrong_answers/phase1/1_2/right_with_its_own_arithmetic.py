"""No divmod; the loader is filled in from a dict of settings.

right
"""

from typing import Any

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
    size, ranks = len(dataset), dist.get_world_size(group)
    if global_batch_size % ranks:
        above = global_batch_size + ranks - global_batch_size % ranks
        choice = [str(n) for n in (above - ranks, above) if n > 0]
        raise ValueError(f"{ranks} ranks cannot share {global_batch_size}: {' or '.join(choice)}?")
    if global_batch_size > size:
        raise ValueError(f"{size} samples are less than one batch of {global_batch_size}")
    settings: dict[str, Any] = {"num_workers": num_loader_workers, "drop_last": True}
    settings["sampler"] = ShardSampler(
        size, dist.get_rank(group), ranks, seed=seed, shuffle=shuffle
    )
    settings["generator"] = torch.Generator()
    loader = ShardLoader(dataset, batch_size=global_batch_size // ranks, **settings)
    loader.set_epoch(0)
    return loader
