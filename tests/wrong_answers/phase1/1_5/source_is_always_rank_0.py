"""The tree begins at rank 0, whatever src is.

rejected by: test_broadcast_from_every_rank_of_every_kind
phrase: src 1
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    have = 1
    while have < size:
        if rank < have and rank + have < size:
            dist.send(x, group=group, group_dst=rank + have)
        elif have <= rank < 2 * have:
            dist.recv(x, group=group, group_src=rank - have)
        have *= 2
