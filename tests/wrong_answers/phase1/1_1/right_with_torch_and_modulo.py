"""Another permutation, other arithmetic: every place of the order is looked up.

right
"""

import torch


def shard_indices(
    num_samples: int,
    rank: int,
    world_size: int,
    *,
    epoch: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> list[int]:
    if num_samples <= 0 or rank not in range(world_size):
        raise ValueError(f"rank {rank} of {world_size}, {num_samples} samples")
    order = list(range(num_samples))
    if shuffle:
        generator = torch.Generator().manual_seed(hash((seed, epoch, "order".__len__())))
        order = torch.randperm(num_samples, generator=generator).tolist()
    shard, place = [], rank
    end = num_samples - num_samples % world_size if drop_last else num_samples
    while place - rank < end:
        shard.append(order[place % num_samples])
        place += world_size
    return shard
