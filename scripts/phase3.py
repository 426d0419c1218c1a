"""What the pictures and the quoted numbers of phase3_multi_node/guidelines.md show.

A torch.distributed program like any other: it says ``init_process_group`` and runs one subject.

    distlab sim --ranks 4 --plot ring.png scripts/phase3.py ring_all_reduce
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase3_multi_node import ring_allreduce, zero

# ring_allreduce

GRADIENTS = 25_600_000  # parameters of a ResNet-50, as float32 102.4 MB


def main() -> None:
    """Run the subject named on the command line."""
    dist.init_process_group()
    SUBJECTS[sys.argv[1]]()
    dist.destroy_process_group()


def ring_reduce_scatter() -> None:
    """Sum the gradients of a ResNet-50, a chunk on each rank."""
    ring_allreduce.ring_reduce_scatter(torch.empty(GRADIENTS, device="meta"))


def ring_all_reduce() -> None:
    """Sum them on all ranks."""
    ring_allreduce.ring_all_reduce(torch.empty(GRADIENTS, device="meta"))


def segmented_ring() -> None:
    """Sum them in segments of at most 8 MiB."""
    ring_allreduce.segmented_ring_all_reduce(torch.empty(GRADIENTS, device="meta"))


def short_segments() -> None:
    """Sum them in segments of at most 1 MiB."""
    x = torch.empty(GRADIENTS, device="meta")
    ring_allreduce.segmented_ring_all_reduce(x, segment_bytes=2**20)


# zero


def fully_sharded() -> None:
    """Go forward and back once through four layers, each of them a unit."""
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    model = zero.FullyShardedDataParallel(layers, compute_dtype=torch.float32)
    model(torch.ones(256, 256)).sum().backward()


SUBJECTS = {
    subject.__name__: subject
    for subject in (
        *(ring_reduce_scatter, ring_all_reduce, segmented_ring, short_segments),
        fully_sharded,
    )
}

if __name__ == "__main__":
    main()
