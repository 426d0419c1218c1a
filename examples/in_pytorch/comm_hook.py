"""Compare your CompressionHook, which sends int8, with a hook of torch's for 16 bits.

distlab sim --ranks 4 examples/in_pytorch/comm_hook.py
torchrun --nproc-per-node 2 examples/in_pytorch/comm_hook.py
"""

from collections.abc import Callable

import lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
Hook = Callable[..., torch.futures.Future[Tensor]]


def gradients(model: nn.Module, hook: Hook) -> Tensor:
    """Return the gradients (steps, n) of steps on one batch, in which the model doesn't change."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = []
    for _ in range(STEPS):
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()
        steps.append(torch.cat([gradient.flatten() for gradient in lesson.gradients(ddp)]))
    return torch.stack(steps)


def main() -> None:
    """Print how far the gradients are from the uncompressed ones."""
    dist.init_process_group()
    codecs = lesson.load("gradient_compression", "4.11")
    hooks = lesson.load("comm_hook", "4.13")
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    exact = gradients(model, default_hooks.allreduce_hook).mean(0)
    ways: dict[str, Hook] = {
        "yours": hooks.CompressionHook(model, lambda x, _: codecs.quantized(x, codecs.Int8())),
        "fp16_compress_hook": default_hooks.fp16_compress_hook,
    }
    for name, hook in ways.items():
        steps = gradients(model, hook)
        errors = [(x - exact).norm() / exact.norm() for x in (steps[0], steps.mean(0))]
        lesson.say(
            f"{name}: {errors[0]:.2%} off in one step, {errors[1]:.2%} in the mean of {STEPS}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
