"""No deadlock, but the directions do not travel at the same time.

rejected by: test_both_directions_travel_at_the_same_time
phrase: should take the time of 1 message
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    if dist.get_rank(group) % 2 == 0:
        dist.send(outgoing, group=group, group_dst=dst)
        dist.recv(incoming, group=group, group_src=src)
    else:
        dist.recv(incoming, group=group, group_src=src)
        dist.send(outgoing, group=group, group_dst=dst)
