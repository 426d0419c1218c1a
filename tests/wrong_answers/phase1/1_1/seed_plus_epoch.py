"""Seed 0 in epoch 1 is seed 1 in epoch 0.

rejected by: test_the_order_is_fixed_by_seed_and_epoch_alone
phrase: not on their sum
"""

import numpy as np


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
    order = np.arange(num_samples)
    if shuffle:
        order = np.random.default_rng(seed + epoch).permutation(num_samples)
    per_rank = num_samples // world_size if drop_last else -(-num_samples // world_size)
    return np.resize(order, per_rank * world_size)[rank::world_size].tolist()
