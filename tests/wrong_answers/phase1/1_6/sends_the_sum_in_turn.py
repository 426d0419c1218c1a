"""Rank 0 sends the sum to one rank after the other, where a tree was asked for.

rejected by: test_naive_sum_passes_through_rank_0
phrase: Ranks that have the sum pass it on
"""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce_naive(x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank:
        dist.send(x, group=group, group_dst=0)
        dist.recv(x, group=group, group_src=0)
        return
    arrived = torch.empty_like(x)
    for src in range(1, n):
        dist.recv(arrived, group=group, group_src=src)
        x += arrived
    for dst in range(1, n):
        dist.send(x, group=group, group_dst=dst)
