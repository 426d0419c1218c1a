"""Averages what is equal already.

rejected by: test_gradients_become_their_mean
phrase: this rank's own
"""

import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce


def average_gradients(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    for parameter in module.parameters():
        values = parameter.detach().contiguous()
        all_reduce(values, group)
        parameter.detach().copy_(values / dist.get_world_size(group))
