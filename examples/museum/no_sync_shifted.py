"""no_sync() leaves out the last micro-batch of a step instead of the first.

Retold from modelscope/FunASR#3472. On gloo, the biases end at -0.0364 and -0.0312.

distlab sim --ranks 2 --sanitize examples/museum/no_sync_shifted.py
torchrun --nproc-per-node 2 examples/museum/no_sync_shifted.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Accumulate the gradients of two micro-batches in every step."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, batch in enumerate(torch.randn(4, 16, 8)):
        with model.no_sync() if index % 2 else contextlib.nullcontext():
            model(batch).square().mean().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: bias {model.module.bias.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
