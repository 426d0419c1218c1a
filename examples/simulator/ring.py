"""All-reduce around a ring, built from isend and irecv.

distlab sim --ranks 8 examples/simulator/ring.py --kib 64
torchrun --nproc-per-node 2 examples/simulator/ring.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(x: Tensor) -> None:
    """Sum ``x`` over all p ranks, in place: 2(p-1) messages of n/p bytes from each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(size)
    arrived = torch.empty_like(chunks[0])
    for step in range(size - 1):  # a sum grows on its way around: chunk r ends up on rank r - 1
        mine, yours = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        pass_on(mine, arrived[: len(yours)])
        yours += arrived[: len(yours)]
    for step in range(size - 1):  # the complete sums travel around the ring
        pass_on(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])


def pass_on(outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the right neighbour while receiving from the left one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % size)
    recv = dist.P2POp(dist.irecv, incoming, (rank - 1) % size)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


def main() -> None:
    """Sum a tensor of ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kib", type=int, default=64, help="size of the tensor")
    kib = parser.parse_args().kib
    dist.init_process_group()
    x = torch.ones(256 * kib)  # float32
    all_reduce(x)
    if dist.get_rank() == 0:
        ends = f"the first is {x[0]:.0f}, the last {x[-1]:.0f}"
        print(f"{kib} KiB of ones, summed over {dist.get_world_size()} ranks: {ends}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
