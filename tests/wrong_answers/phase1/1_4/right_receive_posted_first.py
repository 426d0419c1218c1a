"""Posts the receive, then a blocking send.

right
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    arriving = dist.irecv(incoming, group=group, group_src=src)
    dist.send(outgoing, group=group, group_dst=dst)
    arriving.wait()
