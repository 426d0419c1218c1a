"""The outputs of a gather are one tensor, several times.

Retold from pytorch/pytorch#5506. On gloo, rank 0 gets 2, 2 and 2, and not 0, 1 and 2.

distlab sim --ranks 3 --sanitize examples/museum/one_tensor_for_all.py
torchrun --nproc-per-node 3 examples/museum/one_tensor_for_all.py
"""

import torch
import torch.distributed as dist


def main() -> None:
    """Gather a number of every rank on rank 0."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.zeros(1)] * size if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), outputs, dst=0)
    if outputs is not None:
        print(f"rank 0 got {[output.item() for output in outputs]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
