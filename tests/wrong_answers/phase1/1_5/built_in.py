"""Calls the library's own.

rejected by: test_broadcast_takes_logarithmically_many_rounds
phrase: calls a built-in collective
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def broadcast(x: Tensor, src: int = 0, group: Group = None) -> None:
    dist.broadcast(x, group=group, group_src=src)
