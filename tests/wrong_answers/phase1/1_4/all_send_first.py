"""Two blocking calls: all ranks send, and nobody receives.

rejected by: test_a_ring_exchanges_without_deadlock
outcome: hang
phrase: send
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    dist.send(outgoing, group=group, group_dst=dst)
    dist.recv(incoming, group=group, group_src=src)
