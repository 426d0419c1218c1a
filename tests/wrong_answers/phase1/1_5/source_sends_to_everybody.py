"""N-1 rounds: src sends to one rank after the other.

rejected by: test_broadcast_takes_logarithmically_many_rounds
phrase: Whoever has the data passes it on
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    if dist.get_rank(group) == src:
        for rank in range(dist.get_world_size(group)):
            if rank != src:
                dist.send(x, group=group, group_dst=rank)
    else:
        dist.recv(x, group=group, group_src=src)
