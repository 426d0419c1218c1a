"""One message for all tensors of a dtype, by the library's own broadcast.

right
"""

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel.collectives import Group


@torch.no_grad()
def broadcast_parameters(module: nn.Module, src: int = 0, group: Group = None) -> None:
    tensors = [*module.buffers(), *module.parameters()]
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        bucket = torch.cat([tensor.flatten() for tensor in alike])
        dist.broadcast(bucket, group=group, group_src=src)
        for tensor, part in zip(alike, bucket.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view(tensor.shape))
