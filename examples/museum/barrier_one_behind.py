"""One rank skips a barrier, and its next barrier meets the one before.

Retold from pytorch/pytorch#138322. On gloo, rank 3 finishes, and the others get `Connection closed
by peer`.

distlab sim --ranks 4 examples/museum/barrier_one_behind.py
torchrun --nproc-per-node 4 examples/museum/barrier_one_behind.py
"""

import torch.distributed as dist


def main() -> None:
    """Let all ranks but the last wait for a file, and all ranks wait for the start."""
    dist.init_process_group()
    rank = dist.get_rank()
    if rank != 3:
        dist.barrier()  # until the file is there: rank 3 does not need it
    dist.barrier()  # start together
    print(f"rank {rank} starts")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
