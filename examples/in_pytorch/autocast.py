"""Compare your step in mixed precision with DDP under autocast, both in bfloat16.

distlab sim --ranks 4 examples/in_pytorch/autocast.py
torchrun --nproc-per-node 2 examples/in_pytorch/autocast.py
"""

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Take a step on four samples per rank. In bfloat16, torch needs no scaler."""
    dist.init_process_group()
    course = lesson.load("mixed_precision", "2.3", "2.4")
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 3), nn.Linear(8, 3)
    theirs.load_state_dict(ours.state_dict())
    ddp = DistributedDataParallel(theirs)
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = torch.randn(4, 8), torch.randint(3, (4,))

    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = course.LossScaler()
    course.mixed_precision_step(ours, optimizer, scaler, (inputs, targets), dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(ddp(inputs), targets)
    loss.backward()
    lesson.compare("gradients", lesson.gradients(ours), lesson.gradients(theirs))
    lesson.say(f"gradients of DDP: {lesson.gradients(theirs)[0].dtype}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
