"""Two ranks swap numbers, and rank 1 first waits for rank 0. Where is the mistake?

distlab sim --ranks 2 examples/first_hour/swap.py
"""

import torch
import torch.distributed as dist


def swap(mine: torch.Tensor) -> torch.Tensor:
    """Return the other rank's number."""
    theirs = torch.empty_like(mine)
    if dist.get_rank() == 0:
        dist.send(mine, 1)
        dist.recv(theirs, 1)
        dist.barrier()
    else:
        dist.barrier()  # wait until rank 0 is ready
        dist.recv(theirs, 0)
        dist.send(mine, 0)
    return theirs


def main() -> None:
    """Swap the numbers of rank 0 and rank 1."""
    dist.init_process_group()
    rank = dist.get_rank()
    print(f"rank {rank} got {swap(torch.tensor([rank])).item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
