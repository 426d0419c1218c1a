"""Compare your broadcast and all-reduces with torch's own.

distlab sim --ranks 4 examples/in_pytorch/collectives.py
torchrun --nproc-per-node 2 examples/in_pytorch/collectives.py
"""

import lesson
import torch
import torch.distributed as dist


def main() -> None:
    """Broadcast, sum and scatter the same numbers in both ways."""
    dist.init_process_group()
    collectives = lesson.load("collectives", "1.4", "1.6", "1.7")
    scatter_batch = lesson.load("data_loader", "1.5").scatter_batch
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    ours, theirs = x.clone(), x.clone()
    collectives.broadcast(ours)
    dist.broadcast(theirs, src=0)
    lesson.compare("broadcast", [ours], [theirs])
    for name in ("all_reduce_naive", "all_reduce_recursive_doubling"):
        ours, theirs = x.clone(), x.clone()
        getattr(collectives, name)(ours)
        dist.all_reduce(theirs)
        lesson.compare(name, [ours], [theirs])
    rows = torch.arange(4.0 * size).view(-1, 1)
    ours, _ = scatter_batch((rows, rows) if rank == 0 else None)
    theirs = torch.empty(4, 1)
    dist.scatter(theirs, [*rows.split(4)] if rank == 0 else None)
    lesson.compare("scatter", [ours], [theirs])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
