"""Gathers all tensors by doubling, then each rank adds, beginning with its own.

rejected by: test_doubling_gives_all_ranks_the_same_bits
phrase: add in different orders
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, exchange


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts, arrived = {rank: x.clone()}, torch.empty_like(x)
    for step in range(1, size):
        exchange(x, (rank + step) % size, arrived, (rank - step) % size, group)
        parts[(rank - step) % size] = arrived.clone()
    for step in range(1, size):
        x += parts[(rank + step) % size]
