"""The mean is computed and never copied back.

rejected by: test_gradients_become_their_mean
phrase: average_gradients_flat
"""

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.trainer import _gradients


def average_gradients_flat(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    bucket = torch.cat([gradient.flatten() for gradient in _gradients(module)])
    all_reduce(bucket, group)
    bucket /= dist.get_world_size(group)
