"""Compare your train_step_ahead with DDP and clip_grad_norm_.

distlab sim --ranks 4 examples/in_pytorch/clip.py
torchrun --nproc-per-node 2 examples/in_pytorch/clip.py
"""

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    """Clip the gradient of four samples per rank to a norm of 0.1, in both ways."""
    dist.init_process_group()
    train_step_ahead = lesson.load("gpu", "1.14").train_step_ahead
    torch.manual_seed(0)
    ours, theirs = nn.Linear(8, 3), nn.Linear(8, 3)
    theirs.load_state_dict(ours.state_dict())
    ddp = DistributedDataParallel(theirs)
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = torch.randn(4, 8), torch.randint(3, (4,))

    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    numbers = train_step_ahead(ours, optimizer, (inputs, targets), max_norm=0.1)
    cross_entropy(ddp(inputs), targets).backward()
    norm = clip_grad_norm_(theirs.parameters(), 0.1)  # a tensor: nothing waits for it
    lesson.compare("norm", [torch.tensor(numbers.gradient_norm)], [norm])
    lesson.compare("clipped gradients", lesson.gradients(ours), lesson.gradients(theirs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
