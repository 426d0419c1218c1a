"""What follows from ``wait()`` on GPUs, in the programs of five tasks. Predict, then run it.

distlab sim --semantics nccl --ranks 4 examples/simulator/after_wait.py two_inboxes
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

MIB = 2**18  # elements of float32

# torch 2.13 has new names for these functions, and warns about the old ones
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def send_segments(num_inboxes: int, device: torch.device) -> None:
    """Task 3.3: send four segments around the ring; start the next one, then add the last one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4, 8 * MIB, device=device)
    inboxes = torch.empty(num_inboxes, 8 * MIB, device=device)
    under_way = []
    for segment in range(4):
        inbox = inboxes[segment % num_inboxes]
        send = dist.P2POp(dist.isend, x[segment], (rank + 1) % world_size)
        recv = dist.P2POp(dist.irecv, inbox, (rank - 1) % world_size)
        under_way.append((dist.batch_isend_irecv([send, recv]), x[segment], inbox))
        if len(under_way) == 2:
            add_arrived(*under_way.pop(0))
    add_arrived(*under_way.pop())


def add_arrived(works: list[dist.Work], mine: Tensor, inbox: Tensor) -> None:
    for work in works:
        work.wait()
    mine += inbox


def two_inboxes(device: torch.device) -> None:
    """Let two inboxes take turns."""
    send_segments(2, device)


def one_inbox(device: torch.device) -> None:
    """Let the next segment arrive where the last one is still being added from."""
    send_segments(1, device)


def finish(device: torch.device) -> None:
    """Task 3.11: print when the host is done with each part of a step."""
    weight, start = torch.ones(2048, 2048, device=device), time.perf_counter()
    works, buckets = [], []
    for _ in range(4):
        buckets.append(weight @ weight)  # as a layer's backward pass computes a gradient
        works.append(dist.all_reduce(buckets[-1], async_op=True))
    backward = time.perf_counter()
    for work, bucket in zip(works, buckets, strict=True):
        work.wait()
        bucket /= dist.get_world_size()
    finished = time.perf_counter()
    torch.cuda.synchronize()
    ends = {"backward": backward, "finish": finished, "synchronize": time.perf_counter()}
    for name, end in ends.items() if dist.get_rank() == 0 else ():
        print(f"{name:<12}{1e6 * (end - start):6.0f} µs")


def next_bucket(device: torch.device) -> None:
    """Task 3.13: fill the memory of a bucket again, whose reduce-scatter was started before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bucket = torch.empty(16 * MIB, device=device)
    shard = bucket.tensor_split(world_size)[rank]
    for gradient in (1.0, 2.0):
        bucket.fill_(gradient)
        work = reduce_scatter(shard, bucket, async_op=True)
    work.wait()


def reduce_and_gather(gradients: dist.ProcessGroup | None, device: torch.device) -> None:
    """Task 3.14: reduce the unit before, gather the next one, compute this one; three times."""
    world_size = dist.get_world_size()
    x, whole = torch.ones(4096, 800, device=device), torch.ones(32 * MIB, device=device)
    shard, mean = (torch.ones(32 * MIB // world_size, device=device) for _ in range(2))
    for _ in range(3):
        reduced = reduce_scatter(mean, whole, group=gradients, async_op=True)
        gathered = all_gather(torch.empty_like(whole), shard, async_op=True)
        x.T @ x
        gathered.wait()  # before the next unit computes
    reduced.wait()


def one_group(device: torch.device) -> None:
    """Gather and reduce in one group."""
    reduce_and_gather(None, device)


def two_groups(device: torch.device) -> None:
    """Gather in one group, reduce in another."""
    reduce_and_gather(dist.new_group(device_id=device), device)


def ask_after_steps(control: dist.ProcessGroup | None, device: torch.device) -> None:
    """Task 4.7: ask after each step of ten kernels whether any rank has to stop."""
    x = torch.ones(1024, 1024, device=device)
    for _ in range(5):
        time.sleep(200e-6)  # as long as Python needs to get a batch and to log the step
        for _ in range(10):
            x = x @ x
        flag = torch.full((), 0, device="cpu" if control else device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=control)
        if flag:
            break


def ask_nccl(device: torch.device) -> None:
    """Ask in the group that trains."""
    ask_after_steps(None, device)


def ask_gloo(device: torch.device) -> None:
    """Ask in a group for the hosts."""
    ask_after_steps(dist.new_group(backend="gloo"), device)


def main() -> None:
    """Run the program that is named on the command line."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    programs = (two_inboxes, one_inbox, finish, next_bucket, one_group, two_groups)
    programs += (ask_nccl, ask_gloo)
    {program.__name__: program for program in programs}[sys.argv[1]](device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
