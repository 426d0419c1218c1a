"""Does not use the all-reduce that it is given.

rejected by: test_the_number_of_all_reduces
phrase: the all-reduce it was given
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
        dist.all_reduce(total, group=group)
        gradient.copy_(total / dist.get_world_size(group))
