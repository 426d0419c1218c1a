"""Right sums; the whole tensor goes round N-1 times.

rejected by: test_doubling_takes_logarithmically_many_rounds
phrase: should take 2 rounds
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, exchange


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    passed, arrived = x.clone(), torch.empty_like(x)
    for _ in range(size - 1):
        exchange(passed, (rank + 1) % size, arrived, (rank - 1) % size, group)
        x += arrived
        passed, arrived = arrived, passed
