"""Computes the shard, and keeps it to itself.

rejected by: test_shards_cover_the_data_set_and_do_not_overlap
phrase: shard_indices returned None: is there a return?
"""

from solutions.phase1_data_parallel.data_loader import shard_indices as _shard_indices


def shard_indices(num_samples: int, rank: int, world_size: int, **options: int) -> None:
    _shard_indices(num_samples, rank, world_size, **options)
