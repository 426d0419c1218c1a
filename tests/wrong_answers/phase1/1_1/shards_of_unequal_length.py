"""The tail goes to the first ranks only.

rejected by: test_shards_cover_the_data_set_and_do_not_overlap
phrase: unequal length
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
        order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    return order[rank::world_size].tolist()
