"""The programs behind the pictures and numbers in phase1_data_parallel/guidelines.md.

A torch.distributed program like any other: it calls ``init_process_group`` and runs one function.

    distlab sim --cluster laptop --ranks 8 --plot broadcast.png scripts/phase1.py broadcast
    torchrun --nproc-per-node 4 scripts/phase1.py measure
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase1_data_parallel import collectives, data_loader, trainer

MODEL_ELEMENTS = 65_994  # parameters of the CNN that Phase 1 trains; 264 kB as float32


def main() -> None:
    """Run the function of this file that the command line names."""
    dist.init_process_group()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()


def broadcast() -> None:
    """Copy the CNN's parameters from rank 0."""
    collectives.broadcast(torch.ones(MODEL_ELEMENTS))


def all_reduce_naive() -> None:
    """Sum the CNN's gradients through rank 0."""
    collectives.all_reduce_naive(torch.ones(MODEL_ELEMENTS))


def all_reduce_recursive_doubling() -> None:
    """Sum the CNN's gradients by recursive doubling, with sums swapped in pairs."""
    collectives.all_reduce_recursive_doubling(torch.ones(MODEL_ELEMENTS))


def scatter_batch() -> None:
    """Distribute 64 images of 8 x 8 pixels from rank 0."""
    batch = torch.ones(64, 1, 8, 8), torch.ones(64, dtype=torch.long)
    data_loader.scatter_batch(batch if dist.get_rank() == 0 else None)


def both_send_first() -> None:
    """Swap a number with a neighbour in the naive way, which hangs."""
    partner = dist.get_rank() ^ 1
    x, arrived = torch.ones(1), torch.empty(1)
    dist.send(x, partner)
    dist.recv(arrived, partner)


def exchange() -> None:
    """Send the CNN's gradients one step around the ring."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(MODEL_ELEMENTS)
    collectives.exchange(x, (rank + 1) % world_size, torch.empty_like(x), (rank - 1) % world_size)


def measure() -> None:
    """Print the time of each all-reduce for each size."""
    sizes = [4**k for k in range(2, 13, 2)]
    times = collectives.measure_all_reduce(collectives.ALL_REDUCES, sizes)
    if dist.get_rank() == 0:
        print(times)


def train_step() -> None:
    """Take one step of a two-layer model on 1,024 samples per rank."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(1024, 1024), torch.randint(10, (1024,))
    trainer.train_step(model, optimizer, batch)


if __name__ == "__main__":
    main()
