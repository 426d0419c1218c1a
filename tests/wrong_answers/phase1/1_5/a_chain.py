"""Every rank passes it to the next: few messages each, N-1 rounds.

rejected by: test_broadcast_takes_logarithmically_many_rounds
phrase: rounds
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    size = dist.get_world_size(group)
    position = (dist.get_rank(group) - src) % size
    if position > 0:
        dist.recv(x, group=group, group_src=(position - 1 + src) % size)
    if position < size - 1:
        dist.send(x, group=group, group_dst=(position + 1 + src) % size)
