"""After which lines is the host late? Predict the five times, then run it.

distlab sim --ranks 2 --semantics nccl examples/simulator/what_wait_means.py
torchrun --nproc-per-node 2 examples/simulator/what_wait_means.py
"""

import os
import time

import torch
import torch.distributed as dist


def main() -> None:
    """Sum a tensor over the ranks beside a product, and print when the host is done with a line."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    x, y = torch.ones(8_000_000, device=device), torch.ones(1024, 1024, device=device)
    dist.all_reduce(x)  # the first call also sets up NCCL
    torch.cuda.synchronize()
    ends = [time.perf_counter()]
    work = dist.all_reduce(x, async_op=True)
    ends.append(time.perf_counter())
    product = y @ y
    ends.append(time.perf_counter())
    work.wait()
    ends.append(time.perf_counter())
    doubled = x * 2
    ends.append(time.perf_counter())
    (doubled[0] + product[0, 0]).item()
    ends.append(time.perf_counter())
    names = ("all_reduce", "y @ y", "wait()", "x * 2", "item()")
    for name, end in zip(names, ends[1:], strict=True) if dist.get_rank() == 0 else ():
        print(f"{name:<12}{1e6 * (end - ends[0]):5.0f} µs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
