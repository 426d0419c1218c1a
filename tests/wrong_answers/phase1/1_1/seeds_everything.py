"""Seeds torch for all, so that dropout repeats itself in every epoch.

rejected by: test_global_generators_are_left_alone
phrase: moved the global generator of torch
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
    if not 0 <= rank < world_size or num_samples < 1:
        raise ValueError("no such shard")
    torch.manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(num_samples).tolist() if shuffle else list(range(num_samples))
    per_rank = num_samples // world_size if drop_last else -(-num_samples // world_size)
    places = (order * world_size)[: per_rank * world_size]
    return places[rank::world_size]
