"""Each rank clips its shard of the gradient by the norm of that shard.

Retold from sgl-project/SpecForge#663. On gloo, the first norms are 1.609 and 3.229, not 3.608.

distlab sim --ranks 2 --sanitize examples/museum/norm_of_a_shard.py
torchrun --nproc-per-node 2 examples/museum/norm_of_a_shard.py
"""

import torch
import torch.distributed as dist
from torch import nn


def differentiate(shard: nn.Parameter, batch: torch.Tensor) -> None:
    """Put this rank's part of the mean gradient into ``shard.grad``."""
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard.detach())
    weight = torch.cat(shards).requires_grad_()
    loss = (batch @ weight.T).square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter(shard.grad, list(gradient.div(len(shards)).chunk(len(shards))))


def main() -> None:
    """Train a layer of which each rank keeps half of the rows."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    shard = nn.Parameter((1 + dist.get_rank()) * torch.randn(4, 8))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    for batch in torch.randn(3, 16, 8):
        differentiate(shard, batch)
        norm = nn.utils.clip_grad_norm_([shard], max_norm=0.1)
        optimizer.step()
        print(f"rank {dist.get_rank()}: norm {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
