"""Three lines in each training step make the host wait for the GPU. Which ones, at what price?

distlab sim --ranks 2 --semantics nccl examples/simulator/host_syncs.py
distlab sim --ranks 2 --semantics nccl examples/simulator/host_syncs.py --repaired
torchrun --nproc-per-node 2 examples/simulator/host_syncs.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def waits(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, total: Tensor) -> Tensor:
    """Train for one step; return the sum of the losses so far."""
    x = x.to(total.device)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if not loss.isfinite():
        raise RuntimeError("the loss is not finite")
    optimizer.step()
    return total + loss.item()


def goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, total: Tensor) -> Tensor:
    """Do the same without needing to know anything that the GPU has yet to compute."""
    x = x.pin_memory().to(total.device, non_blocking=True)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return total + loss.detach()


def main() -> None:
    """Train for ten steps, and only then read what the GPU has summed up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repaired", action="store_true")
    step = goes_on if parser.parse_args().repaired else waits
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(dist.get_rank())
    total = torch.zeros((), device=device)
    for _ in range(10):
        total = step(model, optimizer, torch.randn(1024, 512), total)
    mean = total.item() / 10
    if not mean < float("inf"):
        raise RuntimeError("the loss is not finite")
    print(f"rank {dist.get_rank()}: mean loss {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
