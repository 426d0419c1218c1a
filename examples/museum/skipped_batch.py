"""A rank that runs out of memory skips its batch, and the other ranks don't.

Retold from pytorch/pytorch#44353. On gloo, rank 0 calls a lost connection out of memory.

distlab sim --ranks 2 examples/museum/skipped_batch.py
torchrun --nproc-per-node 2 examples/museum/skipped_batch.py
"""

import torch
import torch.distributed as dist
from torch import nn


def train_batch(model: nn.Module, batch: torch.Tensor) -> None:
    """Do one step, or skip a batch that is too large."""
    try:
        if len(batch) > 16:
            raise RuntimeError("out of memory")  # what a GPU would say
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
    except RuntimeError as error:
        print(f"rank {dist.get_rank()} skips a batch: {error}")


def main() -> None:
    """Train on three batches, one of which is too large."""
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    for step in range(3):
        too_large = step == 1 and dist.get_rank() == 1
        train_batch(model, torch.randn(32 if too_large else 16, 8))
    print(f"rank {dist.get_rank()} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
