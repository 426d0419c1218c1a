"""Compare your training step with DistributedDataParallel.

distlab sim --ranks 4 examples/in_pytorch/ddp.py
torchrun --nproc-per-node 2 examples/in_pytorch/ddp.py
"""

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Start from other weights on each rank; take one step with 4, 5, 6, … samples per rank."""
    dist.init_process_group()
    rank = dist.get_rank()
    trainer = lesson.load("trainer", "1.9", "1.10", "1.11")
    torch.manual_seed(rank)
    ours, theirs = nn.Linear(8, 3), nn.Linear(8, 3)
    theirs.load_state_dict(ours.state_dict())
    trainer.broadcast_parameters(ours)
    ddp = DistributedDataParallel(theirs)  # broadcasts rank 0's
    lesson.compare("parameters at the start", ours.parameters(), theirs.parameters())

    inputs, targets = torch.randn(4 + rank, 8), torch.randint(3, (4 + rank,))
    cross_entropy(ours(inputs), targets).backward()
    trainer.average_gradients(ours)
    cross_entropy(ddp(inputs), targets).backward()  # averages each bucket as soon as it is full
    lesson.compare("average_gradients", lesson.gradients(ours), lesson.gradients(theirs))

    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    trainer.train_step(ours, optimizer, (inputs, targets))
    lesson.compare("train_step", lesson.gradients(ours), lesson.gradients(theirs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
