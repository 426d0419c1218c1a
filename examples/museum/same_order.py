"""A DistributedSampler gives the same order in every epoch.

Retold from pytorch/pytorch#31771. On gloo, all epochs have the same order.

distlab sim --ranks 2 --sanitize examples/museum/same_order.py
torchrun --nproc-per-node 2 examples/museum/same_order.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Print the samples of three epochs."""
    dist.init_process_group()
    data = TensorDataset(torch.arange(12))
    sampler: DistributedSampler[int] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    for epoch in range(3):
        samples = [int(x) for (batch,) in loader for x in batch]
        print(f"rank {dist.get_rank()}, epoch {epoch}: {samples}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
