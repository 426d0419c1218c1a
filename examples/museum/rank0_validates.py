"""Rank 0 validates with the wrapped model, and the other ranks wait in a barrier.

Retold from jpata/particleflow#233. On gloo, it hangs.

distlab sim --ranks 2 examples/museum/rank0_validates.py
torchrun --nproc-per-node 2 examples/museum/rank0_validates.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def validate(model: nn.Module) -> float:
    """Return the loss on the validation data, which one rank can compute alone. Can it?"""
    model.eval()
    with torch.no_grad():
        return model(torch.ones(8, 4)).square().mean().item()


def main() -> None:
    """Train for a step, and validate on rank 0 only."""
    dist.init_process_group()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4)).square().mean().backward()
    if dist.get_rank() == 0:
        print(f"validation loss {validate(model):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
