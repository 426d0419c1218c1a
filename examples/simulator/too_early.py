"""Two ranks send each other a tensor, and each changes its own before it has left. What arrives?

distlab sim --ranks 2 --strict examples/simulator/too_early.py
torchrun --nproc-per-node 2 examples/simulator/too_early.py
"""

import torch
import torch.distributed as dist
from torch import Tensor


def swap(x: Tensor, peer: int) -> Tensor:
    """Return the peer's ``x``, and add 100 to this rank's afterwards. Or is it before?"""
    arrived = torch.empty_like(x)
    send, recv = dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, arrived, peer)
    works = dist.batch_isend_irecv([send, recv])
    x += 100
    for work in works:
        work.wait()
    return arrived


def main() -> None:
    """Swap the numbers of rank 0 and rank 1."""
    dist.init_process_group()
    rank = dist.get_rank()
    arrived = swap(torch.full((4,), float(rank)), 1 - rank)
    print(f"rank {rank} got {arrived[0]:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
