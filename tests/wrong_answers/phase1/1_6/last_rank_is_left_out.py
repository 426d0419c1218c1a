"""Off by one: nobody receives from the last rank.

rejected by: test_naive_sum_passes_through_rank_0
outcome: hang
phrase: rank 1
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, broadcast


def all_reduce_naive(x: Tensor, group: Group = None) -> None:
    if dist.get_rank(group) == 0:
        arrived = torch.empty_like(x)
        for src in range(1, dist.get_world_size(group) - 1):
            dist.recv(arrived, group=group, group_src=src)
            x += arrived
    else:
        dist.send(x, group=group, group_dst=0)
    broadcast(x, 0, group)
