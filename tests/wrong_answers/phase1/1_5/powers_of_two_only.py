"""Sends beyond the last rank.

rejected by: test_broadcast_takes_logarithmically_many_rounds
outcome: hang
phrase: rank
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    size = dist.get_world_size(group)
    position = (dist.get_rank(group) - src) % size
    have = 1
    while have < size:
        if position < have:
            dist.send(x, group=group, group_dst=(position + have + src) % size)
        elif position < 2 * have:
            dist.recv(x, group=group, group_src=(position - have + src) % size)
        have *= 2
