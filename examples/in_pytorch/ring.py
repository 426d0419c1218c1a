"""Compare your reduce-scatter and all-gather with torch's own.

distlab sim --ranks 4 examples/in_pytorch/ring.py
torchrun --nproc-per-node 2 examples/in_pytorch/ring.py
"""

import lesson
import torch
import torch.distributed as dist

# names since torch 2.13, which warns about the older ones
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main() -> None:
    """Sum a tensor whose length the number of ranks divides, and another one."""
    dist.init_process_group()
    ring = lesson.load("ring_allreduce", "3.1", "3.2")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1000 * size, generator=torch.Generator().manual_seed(rank))
    ours, theirs = x.clone(), torch.empty_like(x)
    chunk = ring.ring_reduce_scatter(ours)
    reduce_scatter(their_chunk := x.new_empty(1000), x)
    lesson.compare("reduce-scatter", [chunk], [their_chunk])
    ring.ring_all_gather(ours)
    all_gather(theirs, their_chunk)
    lesson.compare("all-gather", [ours], [theirs])

    odd = x[: 1000 * size - 1]  # torch's two functions need equal chunks
    ours, theirs = odd.clone(), odd.clone()
    ring.ring_all_reduce(ours)
    dist.all_reduce(theirs)
    lesson.compare("all-reduce", [ours], [theirs])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
