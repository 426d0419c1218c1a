"""Each rank takes one block of the order.

rejected by: test_ranks_take_turns
phrase: Ranks take turns
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
    per_rank = num_samples // world_size if drop_last else -(-num_samples // world_size)
    everything = np.resize(order, per_rank * world_size)
    return everything[rank * per_rank : (rank + 1) * per_rank].tolist()
