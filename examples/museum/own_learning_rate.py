"""Each rank lowers its learning rate by its own loss.

Retold from lucidrains/DALLE-pytorch#268. On gloo, the learning rates end at 1e-06 and 0.01, and the
biases at -0.0347 and 0.0219.

distlab sim --ranks 2 --sanitize examples/museum/own_learning_rate.py
torchrun --nproc-per-node 2 examples/museum/own_learning_rate.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train with a learning rate that falls when the loss no longer does."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for batch in torch.randn(6, 16, 8):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
    rate = optimizer.param_groups[0]["lr"]
    print(f"rank {dist.get_rank()}: bias {model.module.bias.item():.4f}, rate {rate:.4g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
