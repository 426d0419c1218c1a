"""An asynchronous all_reduce is divided before it is done.

Retold from OpenNMT/OpenNMT-py#2295. On gloo, each run gives other numbers, such as half of a
rank's own, 0.5 or 1, mixed with the mean, 1.5.

distlab sim --ranks 2 --sanitize examples/museum/never_waited.py
torchrun --nproc-per-node 2 examples/museum/never_waited.py
"""

import torch
import torch.distributed as dist


def average(buffer: torch.Tensor) -> torch.Tensor:
    """Return the mean of a buffer over the ranks."""
    dist.all_reduce(buffer, async_op=True)
    return buffer.div_(dist.get_world_size())


def main() -> None:
    """Average a large buffer of gradients."""
    dist.init_process_group()
    buffer = average(torch.full((2**22,), 1.0 + dist.get_rank()))
    print(f"rank {dist.get_rank()}: between {buffer.min():.2f} and {buffer.max():.2f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
