"""Gradients are averaged, but every rank began with weights of its own.

Retold from horovod/horovod#672. On gloo, the biases end at -0.0635 and 0.0171.

distlab sim --ranks 2 --sanitize examples/museum/never_broadcast.py
torchrun --nproc-per-node 2 examples/museum/never_broadcast.py
"""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient with its mean over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main() -> None:
    """Train for three steps."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(3, 16, 8):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        average_gradients(model)
        optimizer.step()
    print(f"rank {dist.get_rank()}: bias {model.bias.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
