"""One rank has a batch more than the other.

Retold from pytorch/pytorch#33148. On gloo, rank 0 gets `Connection closed by peer`.

distlab sim --ranks 2 examples/museum/uneven_batches.py
torchrun --nproc-per-node 2 examples/museum/uneven_batches.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for an epoch on a dataset of seven batches."""
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(7, 16, 8)[rank::2]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    print(f"rank {rank} has trained for an epoch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
