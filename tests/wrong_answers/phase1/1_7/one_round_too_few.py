"""Stops before the last distance.

rejected by: test_doubling_takes_logarithmically_many_rounds
phrase: so the sum is
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, exchange


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    arrived, distance = torch.empty_like(x), 1
    while 2 * distance < size:
        exchange(x, rank ^ distance, arrived, rank ^ distance, group)
        x += arrived
        distance *= 2
