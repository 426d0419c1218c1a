"""p.grad becomes a view of the bucket: right values, in other tensors.

rejected by: test_gradients_become_their_mean
phrase: Copy the means back into p.grad
"""

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import AllReduce, Group, native_all_reduce
from solutions.phase1_data_parallel.trainer import _gradients


def average_gradients_flat(
    module: nn.Module, all_reduce: AllReduce = native_all_reduce, group: Group = None
) -> None:
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    bucket = torch.cat([gradient.flatten() for gradient in _gradients(module)])
    all_reduce(bucket, group)
    bucket /= dist.get_world_size(group)
    means = torch.split(bucket, [parameter.numel() for parameter in trainable])
    for parameter, mean in zip(trainable, means, strict=True):
        parameter.grad = mean.view(parameter.shape)
