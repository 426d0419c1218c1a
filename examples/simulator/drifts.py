"""Two replicas train with averaged gradients, and drift apart. Nothing fails.

distlab sim --ranks 2 --sanitize examples/simulator/drifts.py
torchrun --nproc-per-node 2 examples/simulator/drifts.py
"""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient with the mean over the ranks. Each one?"""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "weight" in name:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main() -> None:
    """Train for three steps, with the same weights and other data on each rank."""
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print(f"rank {dist.get_rank()}: first bias {model[0].bias[0]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
