"""Pass numbers around a ring. Rank 2 stops on the way, so that you can look inside it.

distlab sim --ranks 4 examples/simulator/look_inside.py
"""

import torch
import torch.distributed as dist
from torch import Tensor


def rotate(x: Tensor) -> Tensor:
    """Return the left neighbour's ``x``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + 1) % size)
    recv = dist.P2POp(dist.irecv, arrived, (rank - 1) % size)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()
    if rank == 2:
        breakpoint()
    return arrived


def main() -> None:
    """Send every rank's number to its right neighbour."""
    dist.init_process_group()
    x = rotate(torch.tensor([dist.get_rank()]))
    print(f"rank {dist.get_rank()} got {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
