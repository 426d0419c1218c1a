"""Sends to the left what should go to the right: nothing fits in size.

rejected by: test_exchange_inside_a_group
phrase: rank
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=src),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=dst),
        ]
    )
    for work in works:
        work.wait()
