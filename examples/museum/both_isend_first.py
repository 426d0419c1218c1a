"""Two ranks swap tensors, and the receives queue up behind the sends.

Retold from intel/torch-ccl#72. On gloo, it works, which says nothing about NCCL.

distlab sim --ranks 2 --p2p-order pair examples/museum/both_isend_first.py
torchrun --nproc-per-node 2 examples/museum/both_isend_first.py
"""

import torch
import torch.distributed as dist


def swap(mine: torch.Tensor, peer: int) -> torch.Tensor:
    """Return the peer's tensor."""
    theirs = torch.empty_like(mine)
    works = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
    for work in works:
        work.wait()
    return theirs


def main() -> None:
    """Swap the tensors of rank 0 and rank 1."""
    dist.init_process_group()
    rank = dist.get_rank()
    print(f"rank {rank} got {swap(torch.full((4,), float(rank)), 1 - rank).tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
