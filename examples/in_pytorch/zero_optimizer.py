"""Compare your ShardedOptimizer with torch's ZeroRedundancyOptimizer.

distlab sim --ranks 4 examples/in_pytorch/zero_optimizer.py
torchrun --nproc-per-node 2 examples/in_pytorch/zero_optimizer.py
"""

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def numbers_of_state(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return for each rank how many numbers Adam's moments have there."""
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, sum(moment.numel() for moment in moments))
    return counts


def main() -> None:
    """Train three steps with Adam; most of the parameters are one weight."""
    dist.init_process_group()
    course = lesson.load("zero", "3.12")
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 1)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    mine = course.ShardedOptimizer(ours.parameters(), torch.optim.Adam)
    ddp = DistributedDataParallel(theirs)  # averages the gradients; torch's optimizer doesn't
    torchs = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.Adam)
    torch.manual_seed(dist.get_rank())
    for inputs in torch.randn(3, 4, 8):
        for model, optimizer in ((ours, mine), (ddp, torchs)):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    lesson.say(f"numbers of state by rank, yours: {numbers_of_state(mine.optimizer)}")
    lesson.say(f"numbers of state by rank, torch's: {numbers_of_state(torchs.optim)}")
    lesson.compare("parameters", ours.parameters(), theirs.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
