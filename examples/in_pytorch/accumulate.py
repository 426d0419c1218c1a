"""Compare your accumulation over ranks with DDP's no_sync.

distlab sim --ranks 4 examples/in_pytorch/accumulate.py
torchrun --nproc-per-node 2 examples/in_pytorch/accumulate.py
"""

from contextlib import nullcontext

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Accumulate micro-batches of 4, 4 and 2 samples, and one more sample on each higher rank."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    step = lesson.load("gradient_accumulation", "2.2").accumulate_step_over_ranks
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 3), nn.Linear(8, 3)
    theirs.load_state_dict(ours.state_dict())
    ddp = DistributedDataParallel(theirs)
    batch = torch.randn(10 + rank, 8), torch.randint(3, (10 + rank,))

    step(ours, torch.optim.SGD(ours.parameters(), lr=0.1), batch, 4)
    num_targets = torch.tensor(10 + rank)
    dist.all_reduce(num_targets)
    for reduction, factor in (("mean", 1 / 3), ("sum", size / num_targets)):
        theirs.zero_grad()
        pairs = [*zip(*(x.split(4) for x in batch), strict=True)]
        for i, (inputs, targets) in enumerate(pairs):
            with ddp.no_sync() if i < len(pairs) - 1 else nullcontext():
                (factor * cross_entropy(ddp(inputs), targets, reduction=reduction)).backward()
        lesson.compare(f"no_sync, {reduction}", lesson.gradients(ours), lesson.gradients(theirs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
