"""The order comes from a generator that whatever else draws has moved.

rejected by: test_shards_cover_the_data_set_and_do_not_overlap
phrase: nobody sees the samples
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
        order = np.random.permutation(num_samples)
    per_rank = num_samples // world_size if drop_last else -(-num_samples // world_size)
    return np.resize(order, per_rank * world_size)[rank::world_size].tolist()
