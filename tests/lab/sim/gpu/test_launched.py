"""Simulated GPUs in a supervised process, as graders start them."""

import torch
import torch.distributed as dist

from distlab import launch
from distlab.sim import Options


def summed() -> float:
    x = torch.full((4,), float(dist.get_rank()), device=launch.context().device)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()
    return x.sum().item()


def test_a_supervised_world_has_gpus_and_returns_their_times() -> None:
    world = launch.simulate(summed, 2, cluster="dgx-h100", options=Options(semantics="nccl"))
    assert world.gpu_time is not None
    (wait, other) = world.gpu_time.host_waits
    assert (wait.reason, wait.count, other.rank) == (".item()", 1, 1)
    assert len(world.gpu_time.ranks) == 2
    (wrong,) = world.gpu_time.wrong
    assert "add_ overwrites what all_reduce (call 1 of ranks 0 and 1) writes" in wrong
