"""Calls the library's own.

rejected by: test_naive_sum_passes_through_rank_0
phrase: calls a built-in collective
"""

import torch.distributed as dist
from torch import Tensor

from solutions.phase1_data_parallel.collectives import Group


def all_reduce_naive(x: Tensor, group: Group = None) -> None:
    dist.all_reduce(x, group=group)
