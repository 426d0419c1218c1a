"""Compare your loss scaler with torch's, for one process and for sharded gradients.

distlab sim --ranks 4 examples/in_pytorch/amp.py
torchrun --nproc-per-node 2 examples/in_pytorch/amp.py
"""

from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def scales(scaler: Any, inf_on: int) -> list[float]:
    """Take two steps, the first with an inf in one rank's gradient; return each rank's scale."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient in (float("inf") if dist.get_rank() == inf_on else 1.0, 1.0):
        scaler.scale(weight.sum())  # torch's scalers start here
        weight.grad = torch.full_like(weight, gradient)
        scaler.step(optimizer)
        scaler.update()
    mine = torch.tensor(scaler.value if hasattr(scaler, "value") else scaler.get_scale())
    of_all = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    return [scale.item() for scale in of_all]


def main() -> None:
    """Let the gradient overflow on rank 1 only."""
    dist.init_process_group()
    ours = lesson.load("mixed_precision", "2.3").LossScaler
    lesson.say(f"yours: {scales(ours(), inf_on=1)}")
    lesson.say(f"GradScaler: {scales(GradScaler('cpu'), inf_on=1)}")
    lesson.say(f"ShardedGradScaler: {scales(ShardedGradScaler('cpu'), inf_on=1)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
