"""Each process adds its number to a sum that all of them get.

torchrun --nproc-per-node 2 examples/first_steps/hello.py
distlab sim --ranks 2 examples/first_steps/hello.py
"""

import os

import torch
import torch.distributed as dist


def main() -> None:
    """Join the group, sum a number over all ranks, and print the sum."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(x)
    print(f"rank {rank} of {world_size} on {device}: the sum is {x.item():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
