"""Two ranks swap tensors, and both send before they receive.

Retold from NVIDIA/nccl#479. On gloo, it hangs.

distlab sim --ranks 2 examples/museum/both_send_first.py
torchrun --nproc-per-node 2 examples/museum/both_send_first.py
"""

import torch
import torch.distributed as dist


def swap(mine: torch.Tensor, peer: int) -> torch.Tensor:
    """Return the peer's tensor."""
    theirs = torch.empty_like(mine)
    dist.send(mine, peer)
    dist.recv(theirs, peer)
    return theirs


def main() -> None:
    """Swap the tensors of rank 0 and rank 1."""
    dist.init_process_group()
    rank = dist.get_rank()
    print(f"rank {rank} got {swap(torch.full((4,), float(rank)), 1 - rank)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
