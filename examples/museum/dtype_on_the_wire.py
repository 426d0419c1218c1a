"""A broadcast of float32 arrives in a tensor of int64.

Retold from pytorch/pytorch#91535. On gloo, rank 1 gets 4575657221408423936, 4629700418010611712,
4656722015783223296 and three zeros.

distlab sim --ranks 2 examples/museum/dtype_on_the_wire.py
torchrun --nproc-per-node 2 examples/museum/dtype_on_the_wire.py
"""

import torch
import torch.distributed as dist


def main() -> None:
    """Give all ranks the ids of rank 0."""
    dist.init_process_group()
    ids = torch.zeros(6, dtype=torch.int64)
    if dist.get_rank() == 0:
        ids = torch.tensor([0, 1, 2, 3, 4, 5.0])  # one dot, and all of it is float32
    dist.broadcast(ids, src=0)
    print(f"rank {dist.get_rank()} has {ids.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
