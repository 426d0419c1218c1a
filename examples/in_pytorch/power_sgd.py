"""Compare your PowerSGD, in your CompressionHook, with torch's powerSGD_hook.

distlab sim --ranks 4 examples/in_pytorch/power_sgd.py
torchrun --nproc-per-node 2 examples/in_pytorch/power_sgd.py
"""

from collections.abc import Callable
from typing import Any

import lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANK, STEPS, UNCOMPRESSED = 2, 20, 2  # torch's hook sends its first steps whole, at least two
Hook = Callable[..., torch.futures.Future[Tensor]]


def gradients(model: nn.Module, state: Any, hook: Hook) -> Tensor:
    """Return the weight's gradients (steps, …) on one batch; the model doesn't change."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = []
    for _ in range(UNCOMPRESSED + STEPS):
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()
        steps.append(lesson.gradients(ddp)[0])
    return torch.stack(steps)


def main() -> None:
    """Print how far the gradients of a 32 x 64 weight are from the uncompressed ones."""
    dist.init_process_group()
    power_sgd = lesson.load("power_sgd", "4.12")
    hooks = lesson.load("comm_hook", "4.13")
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    exact = gradients(model, None, default_hooks.allreduce_hook)[0]
    state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=UNCOMPRESSED)
    mine = gradients(model, None, hooks.CompressionHook(model, power_sgd.PowerSGD(RANK)))
    theirs = gradients(model, state, powerSGD_hook.powerSGD_hook)
    for name, steps in (("yours", mine[:STEPS]), ("torch's", theirs[UNCOMPRESSED:])):
        first, mean = ((x - exact).norm() / exact.norm() for x in (steps[0], steps.mean(0)))
        lesson.say(f"{name}: {first:.0%} off in one step, {mean:.0%} in the mean of {STEPS}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
