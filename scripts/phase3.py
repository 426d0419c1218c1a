"""The programs behind the pictures and numbers in phase3_multi_node/guidelines.md.

A torch.distributed program like any other: it calls ``init_process_group`` and runs one function.

    distlab sim --ranks 4 --plot ring.png scripts/phase3.py ring_all_reduce
    torchrun --nproc-per-node 4 scripts/phase3.py tree_all_reduce
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solutions.phase3_multi_node import (
    parameter_server,
    ring_allreduce,
    topology,
    tree_allreduce,
    zero,
)
from solutions.phase3_multi_node.ddp import (
    DistributedDataParallel,
    FlatDataParallel,
    PerParameterDataParallel,
)


def main() -> None:
    """Run the function of this file that the command line names."""
    dist.init_process_group()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()


# ring_allreduce

GRADIENTS = 25_600_000  # about as many as ResNet-50 has parameters; 102.4 MB as float32


def ring_reduce_scatter() -> None:
    """Sum the gradients of a ResNet-50, leaving one chunk on each rank."""
    ring_allreduce.ring_reduce_scatter(torch.empty(GRADIENTS, device="meta"))


def ring_all_reduce() -> None:
    """Sum the gradients around the ring, on all ranks."""
    ring_allreduce.ring_all_reduce(torch.empty(GRADIENTS, device="meta"))


def segmented_ring() -> None:
    """Sum the gradients in segments of at most 8 MiB."""
    ring_allreduce.segmented_ring_all_reduce(torch.empty(GRADIENTS, device="meta"))


def short_segments() -> None:
    """Sum the gradients in segments of at most 1 MiB."""
    x = torch.empty(GRADIENTS, device="meta")
    ring_allreduce.segmented_ring_all_reduce(x, segment_bytes=2**20)


# tree_allreduce

SMALL_ELEMENTS = 65_994  # parameters of the CNN that Phase 1 trains; 264 kB as float32
LARGE_ELEMENTS = 25_557_032  # parameters of a ResNet-50; 102 MB as float32


def tree_all_reduce() -> None:
    """Sum the CNN's gradients along a tree."""
    tree_allreduce.tree_all_reduce(torch.ones(SMALL_ELEMENTS))


def double_tree_in_segments() -> None:
    """Sum the CNN's gradients along two trees, each half in four segments."""
    x = torch.ones(SMALL_ELEMENTS)
    tree_allreduce.double_binary_tree_all_reduce(x, segment_bytes=x.nbytes // 8 + 4)


def double_tree_large() -> None:
    """Sum a ResNet-50's gradients along two trees."""
    x = torch.empty(LARGE_ELEMENTS, device="meta")
    tree_allreduce.double_binary_tree_all_reduce(x)


# topology


def hierarchical_all_reduce() -> None:
    """Sum 4 MB on nodes of 4 ranks, with rings inside the nodes and across them."""
    hosts = [f"node{rank // 4}" for rank in range(dist.get_world_size())]
    inside, across = topology.node_groups(hosts)
    topology.hierarchical_all_reduce(
        torch.ones(10**6),
        inside,
        across,
        reduce_scatter=ring_allreduce.ring_reduce_scatter,
        all_reduce=ring_allreduce.ring_all_reduce,
        all_gather=ring_allreduce.ring_all_gather,
    )


def flat_ring() -> None:
    """Sum 4 MB in one ring of all ranks."""
    ring_allreduce.ring_all_reduce(torch.ones(10**6))


# ddp

LAYERS, WIDTH, ROWS = 8, 4096, 2048
BUCKETS = {"bucket_bytes": 2 * 2 * WIDTH**2, "first_bucket_bytes": 2 * WIDTH**2}


def step_with(wrap: Callable[..., Any], **limits: int) -> None:
    """Run a step of eight layers in 16 bits on meta, where nothing is computed."""
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).bfloat16()
        x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    wrapped = wrap(model, **limits)
    wrapped(x).sum().backward()
    wrapped.finish_gradient_synchronization()


ddp = partial(step_with, DistributedDataParallel, **BUCKETS)
ddp_flat = partial(step_with, FlatDataParallel)
ddp_per_parameter = partial(step_with, PerParameterDataParallel)

# parameter_server


def bounded_staleness() -> None:
    """Serve on rank 0 with a staleness of 2; the last worker takes 4 times as long as any other."""
    rank, workers = dist.get_rank(), [*range(1, dist.get_world_size())]
    shard, num_steps = torch.zeros(1_000_000), 6
    if rank == 0:
        optimizer = torch.optim.SGD([shard], lr=0.1)
        parameter_server.serve_with_bounded_staleness(shard, optimizer, workers, num_steps, 2)
        return
    gradient = torch.ones_like(shard)
    for _ in range(num_steps):
        time.sleep(40e-3 if rank == workers[-1] else 10e-3)
        parameter_server.push_pull({0: gradient}, {0: shard})


# zero


def fully_sharded() -> None:
    """Run one forward and backward pass through four layers, each a unit by itself."""
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    model = zero.FullyShardedDataParallel(layers, compute_dtype=torch.float32)
    model(torch.ones(256, 256)).sum().backward()


Held = dict[str, list[float]]  # by kind and quarter: bytes that a rank holds per parameter
SIDE = 64  # of the weight; an element's value is the number of its quarter, from 1


def zero_stages() -> list[Held]:
    """Take a step with every stage of ZeRO, and return what this rank holds of its state."""
    return [_held_by_optimizer(stage) for stage in range(3)] + [_held_by_units()]


def _held_by_optimizer(stage: int) -> Held:
    """Return what is held in stages 0 to 2; in stage 0, every rank is a group by itself."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = alone[dist.get_rank()] if stage == 0 else None
    wrap = zero.ShardedGradientOptimizer if stage == 2 else zero.ShardedOptimizer
    model = _numbered_model().bfloat16()
    optimizer = wrap(model.parameters(), torch.optim.Adam, group=group, lr=0.0, betas=(0.0, 0.0))
    _backward(model)
    whole = [param.grad for param in model.parameters() if param.grad is not None]
    shards = [bucket.shard for bucket in getattr(optimizer, "buckets", [])]
    gradients = _by_quarter(whole + shards)
    optimizer.step()
    state = optimizer.masters + _moments(optimizer.optimizer)
    return _held([*model.parameters()], gradients, state)


def _held_by_units() -> Held:
    """Return what is held in stage 3."""
    model = zero.FullyShardedDataParallel(_numbered_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.0, 0.0))
    _backward(model)
    gradients = _by_quarter([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    return _held([*model.parameters()], gradients, _moments(optimizer))


def _held(parameters: list[nn.Parameter], gradients: list[float], state: list[Tensor]) -> Held:
    parts = {"parameters": _by_quarter(parameters), "gradients": gradients}
    return {**parts, "optimizer state": _by_quarter(state)}


def _numbered_model() -> nn.Sequential:
    layer = nn.Linear(SIDE, SIDE, bias=False)
    with torch.no_grad():
        layer.weight.copy_(_numbers().expand(SIDE, SIDE).T)
    return nn.Sequential(layer)


def _numbers() -> Tensor:
    """Return the number of its quarter for each row of the weight: 1, …, 1, 2, …, 4."""
    return torch.arange(1, 5).repeat_interleave(SIDE // 4)


def _backward(model: nn.Module) -> None:
    """Make gradients that are equal to the weight."""
    output = model(torch.ones(1, SIDE, dtype=torch.bfloat16))
    (output * _numbers()).sum().backward()


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return Adam's averages; without momentum they are the gradient and its square."""
    states = optimizer.state.values()
    return [
        *(state["exp_avg"] for state in states),
        *(state["exp_avg_sq"].sqrt() for state in states),
    ]


def _by_quarter(tensors: Sequence[Tensor]) -> list[float]:
    """Return the bytes per parameter that tensors have for each quarter of the parameters."""
    sizes = [
        [int((x == number).sum()) * x.element_size() for x in tensors] for number in range(1, 5)
    ]
    return [sum(quarter) / SIDE**2 for quarter in sizes]


if __name__ == "__main__":
    main()
