"""Ranks share each batch, and add up their gradients. Is that what one process computes?

distlab sim --ranks 2 --against one examples/simulator/scaled.py
torchrun --nproc-per-node 2 examples/simulator/scaled.py
"""

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train for three steps on batches of 32 samples, of which each rank has a part."""
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(3, 32, 8):
        optimizer.zero_grad()
        loss = model(batch.tensor_split(world_size)[rank]).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    print(f"rank {rank}: first bias {model[0].bias[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
