"""MPICH's tree: the largest distance first.

right
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    size = dist.get_world_size(group)
    place = (dist.get_rank(group) + size - src) % size
    mask = 1
    while mask < size and not place & mask:
        mask *= 2
    if place:
        dist.recv(x, group=group, group_src=(place - mask + src) % size)
    mask //= 2
    while mask:
        if place + mask < size:
            dist.send(x, group=group, group_dst=(place + mask + src) % size)
        mask //= 2
