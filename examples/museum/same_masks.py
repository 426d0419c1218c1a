"""All replicas have the same seed, and drop the same activations.

Retold from huggingface/transformers#31412. On gloo, it trains without an error.

distlab sim --ranks 2 --sanitize examples/museum/same_masks.py
torchrun --nproc-per-node 2 examples/museum/same_masks.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train with dropout, on other data on each rank."""
    dist.init_process_group()
    torch.manual_seed(40)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(256.0).reshape(2, 4, 4, 8)[dist.get_rank()] / 256
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()}: last loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
