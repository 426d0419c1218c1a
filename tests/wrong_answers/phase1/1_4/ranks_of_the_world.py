"""Takes ranks of the group for ranks of the world.

rejected by: test_exchange_inside_a_group
phrase: group
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    work = dist.isend(outgoing, dst, group=group)
    dist.recv(incoming, src, group=group)
    work.wait()
