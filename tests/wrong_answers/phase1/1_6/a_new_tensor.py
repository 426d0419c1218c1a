"""Rebinds the name: the caller's x stays as it was.

rejected by: test_naive_sum_passes_through_rank_0
phrase: added once
"""

import torch
import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group, broadcast


def all_reduce_naive(x: Tensor, group: Group = None) -> None:
    if dist.get_rank(group) == 0:
        arrived = torch.empty_like(x)
        for src in range(1, dist.get_world_size(group)):
            dist.recv(arrived, group=group, group_src=src)
            x = x + arrived
    else:
        dist.send(x, group=group, group_dst=0)
    broadcast(x, 0, group)
