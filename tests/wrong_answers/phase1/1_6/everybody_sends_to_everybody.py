"""Right sums, N (N-1) messages.

rejected by: test_naive_sum_passes_through_rank_0
phrase: received are [2, 2, 2]
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, exchange


def all_reduce_naive(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine, arrived = x.clone(), torch.empty_like(x)
    for step in range(1, size):
        exchange(mine, (rank + step) % size, arrived, (rank - step) % size, group)
        x += arrived
