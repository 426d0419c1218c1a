"""A layer that the forward pass doesn't use keeps all gradients from being averaged.

Retold from pytorch/pytorch#112152. On gloo, the biases end at -0.0589 and -0.0621.

distlab sim --ranks 2 --sanitize examples/museum/unused_layer.py
torchrun --nproc-per-node 2 examples/museum/unused_layer.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Toy(nn.Module):
    """Two layers, of which the forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the second layer."""
        return self.second(x)


def main() -> None:
    """Take one step, and print the weights."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(20, 10)).square().mean().backward()
    optimizer.step()
    print(f"rank {dist.get_rank()}: bias {model.module.second.bias[0].item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
