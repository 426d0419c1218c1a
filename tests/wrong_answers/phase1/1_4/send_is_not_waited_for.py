"""Returns while the network may still read outgoing.

rejected by: test_outgoing_may_be_written_afterwards
phrase: Wait for the send as well
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group: Group = None) -> None:
    dist.isend(outgoing, group=group, group_dst=dst)
    dist.recv(incoming, group=group, group_src=src)
