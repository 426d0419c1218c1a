"""The ranks beyond hand their tensor over and never fetch the sum.

rejected by: test_doubling_takes_logarithmically_many_rounds
outcome: hang
phrase: rank 0
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, exchange


def all_reduce_recursive_doubling(x: Tensor, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    core, arrived = 2 ** (size.bit_length() - 1), torch.empty_like(x)
    if rank >= core:
        dist.send(x, group=group, group_dst=rank - core)
        return
    if rank + core < size:
        dist.recv(arrived, group=group, group_src=rank + core)
        x += arrived
    distance = 1
    while distance < core:
        exchange(x, rank ^ distance, arrived, rank ^ distance, group)
        x += arrived
        distance *= 2
    if rank + core < size:
        dist.send(x, group=group, group_dst=rank + core)
