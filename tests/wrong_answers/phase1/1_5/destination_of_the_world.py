"""The tree is right, and dst= and src= count in the world.

rejected by: test_broadcast_inside_a_group
phrase: group_dst= and group_src= in the group
"""

import torch.distributed as dist
from torch import Tensor


def broadcast(x: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    size = dist.get_world_size(group)
    position = (dist.get_rank(group) - src) % size
    have = 1
    while have < size:
        if position < have and position + have < size:
            dist.send(x, dst=(position + have + src) % size, group=group)
        elif have <= position < 2 * have:
            dist.recv(x, src=(position - have + src) % size, group=group)
        have *= 2
