"""Ranks from the largest power of two on neither give nor get.

rejected by: test_doubling_takes_logarithmically_many_rounds
phrase: added once, and given to all
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, exchange


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    core = 2 ** (size.bit_length() - 1)
    if rank >= core:
        return
    arrived, distance = torch.empty_like(x), 1
    while distance < core:
        exchange(x, rank ^ distance, arrived, rank ^ distance, group)
        x += arrived
        distance *= 2
