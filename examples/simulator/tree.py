"""All-reduce up and down a binomial tree, built from send and recv.

distlab sim --ranks 8 examples/simulator/tree.py --kib 64
torchrun --nproc-per-node 2 examples/simulator/tree.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(x: Tensor) -> None:
    """Sum ``x`` over all p ranks, in place: log2 p messages up the tree, log2 p down, n bytes each.

    p = 8:   distance 1    1→0  3→2  5→4  7→6
             distance 2    2→0  6→4
             distance 4    4→0              and back in reverse order
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    distances = [2**level for level in range((size - 1).bit_length())]
    arrived = torch.empty_like(x)
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(x, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.recv(arrived, rank + distance)
            x += arrived
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(x, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.send(x, rank + distance)


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
