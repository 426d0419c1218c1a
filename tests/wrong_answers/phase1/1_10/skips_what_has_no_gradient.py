"""A rank without a gradient makes one call less than the others.

rejected by: test_gradients_become_their_mean
phrase: mismatch: all_reduce with size
"""

import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce


def average_gradients(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            total = parameter.grad.contiguous()
            all_reduce(total, group)
            parameter.grad.copy_(total / dist.get_world_size(group))
