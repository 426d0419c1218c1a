"""With drop_last, each rank takes one block of the order: its batches depend on N.

rejected by: test_shards_together_are_the_order_of_one_process
phrase: take turns, not blocks
"""

from solutions.phase1_data_parallel.data_loader import shard_indices as _shard_indices


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
    options = {"epoch": epoch, "seed": seed, "shuffle": shuffle}
    if not drop_last or not 0 <= rank < world_size:
        return _shard_indices(num_samples, rank, world_size, **options)
    order, share = _shard_indices(num_samples, 0, 1, **options), num_samples // world_size
    return order[rank * share : (rank + 1) * share]
