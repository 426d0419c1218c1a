"""A contrastive loss over all ranks goes through an all_gather, which has no gradient.

Retold from huggingface/accelerate#76. On gloo, it trains without an error.

distlab sim --ranks 2 --sanitize examples/museum/cut_by_all_gather.py
torchrun --nproc-per-node 2 examples/museum/cut_by_all_gather.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def contrast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the loss of pairs of features, each ``a`` against each ``b`` of all ranks."""
    parts = [torch.empty_like(b) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, b)
    partners = dist.get_rank() * len(a) + torch.arange(len(a))
    return nn.functional.cross_entropy(a @ torch.cat(parts).T, partners)


def main() -> None:
    """Train two towers for three steps."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(3, 16, 8):
        optimizer.zero_grad()
        features = model(torch.cat([batch, batch + 0.1]))
        contrast(features[:16], features[16:]).backward()
        optimizer.step()
    print(f"rank {dist.get_rank()}: bias {model.module.bias[0].item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
