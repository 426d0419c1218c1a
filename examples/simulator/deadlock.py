"""Each rank sends to its right neighbour, then receives from its left one. Where is the mistake?

distlab sim --ranks 4 examples/simulator/deadlock.py
torchrun --nproc-per-node 2 examples/simulator/deadlock.py
"""

import torch
import torch.distributed as dist


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return the left neighbour's ``x``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    dist.send(x, (rank + 1) % size)
    dist.recv(arrived, (rank - 1) % size)
    return arrived


def main() -> None:
    """Send every rank's number to its right neighbour."""
    dist.init_process_group()
    x = rotate(torch.tensor([dist.get_rank()]))
    print(f"rank {dist.get_rank()} got {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
