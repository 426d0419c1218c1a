"""Divides by the number of ranks in the world, not in the group.

rejected by: test_gradients_inside_a_group
phrase: average_gradients, rank 0 of 3
"""

import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.trainer import _gradients


def average_gradients(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    for gradient in _gradients(module):
        total = gradient.contiguous()
        all_reduce(total, group)
        gradient.copy_(total / dist.get_world_size())
