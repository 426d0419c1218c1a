"""Data-parallel training of a stack of linear layers, on random data.

distlab sim --ranks 4 examples/simulator/train.py --device meta --width 4096
torchrun --nproc-per-node 2 examples/simulator/train.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Run forward and backward, average the gradients over the ranks, and update the parameters."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


def main() -> None:
    """Train for a few steps; ``--device meta`` (tensors without data) needs the simulator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256, help="examples per rank")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    dist.init_process_group()
    with torch.device(args.device):
        model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(args.steps):
            step(model, optimizer, torch.randn(args.batch, args.width))
    if dist.get_rank() == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
