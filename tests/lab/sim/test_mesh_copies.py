"""``--sanitize`` names copies of shards, as hybrid sharding has them, that are not equal."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distlab.sim import Options, simulate

NAMES = ("replicate", "shard")


def findings(program: Callable[..., object], *args: object) -> list[str]:
    return simulate(program, 4, *args, options=Options(is_sanitized=True)).findings


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def data(step: int) -> Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def trains(net: nn.Module, after: Callable[[int], object] = lambda step: None) -> None:
    """Train for four steps, and call a function after each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        net(data(step)).square().mean().backward()
        optimizer.step()
        after(step)


def sharded(mesh: DeviceMesh) -> nn.Module:
    net = model()
    for layer in (net[0], net):
        fully_shard(layer, mesh=mesh)
    return net


def hybrid() -> nn.Module:
    return sharded(grid())


# Wrong programs


def never_reduces_between_replicas() -> None:
    trains(sharded(grid()["shard"]))


def begins_with_other_weights() -> None:
    net = hybrid()
    for parameter in net.parameters():
        assert isinstance(parameter, DTensor)
        generator = torch.Generator().manual_seed(dist.get_rank())
        nn.init.normal_(parameter.to_local(), generator=generator)
    trains(net)


class Sharded(nn.Module):
    """A matrix of which each rank has two rows, and multiplies by them."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        mine = whole[2 * (dist.get_rank() % 2) :][:2]
        self.weight = nn.Parameter(DTensor.from_local(mine, grid(), [Replicate(), Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to_local().T  # type: ignore[operator]


def shards_by_hand() -> None:
    trains(Sharded())


def sets_weights_between_steps() -> None:
    net = hybrid()

    def shrink_one_replica(step: int) -> None:
        if step == 0 and dist.get_rank() >= 2:
            for parameter in net.parameters():
                parameter.data.to_local().mul_(0.5)  # type: ignore[operator]

    trains(net, shrink_one_replica)


DIFFER = "ranks 0 and 2 hold copies of the same shards, which differ"
WRONG = {  # what has come apart, when, and the advice
    never_reduces_between_replicas: (
        f"step 1: {DIFFER} after it, and were never equal again: 0.weight, 0.bias, 2.weight and "
        "2.bias (norm ",
        "Average gradients over these ranks, too",
    ),
    begins_with_other_weights: (f"step 1: {DIFFER} before it", "Begin with equal parameters"),
    shards_by_hand: (
        f"step 1: {DIFFER} after it, and were never equal again: weight (norm",
        "Average gradients over these ranks, too",
    ),
    sets_weights_between_steps: (
        f"step 2: {DIFFER} before it",
        "Something besides the steps has changed them",
    ),
}


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_copies_that_part_are_named(program: Callable[[], None]) -> None:
    lines = findings(program)
    start, advice = WRONG[program]
    assert any(line.startswith(start) and advice in line for line in lines), lines
    assert all(Path(__file__).name in line for line in lines)


# Right programs


def trains_hybrid() -> None:
    trains(hybrid())


def accumulates() -> None:
    """Sum the gradients of two batches, and reduce between replicas only after the second."""
    net = hybrid()
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            net.set_requires_all_reduce(part == 1)  # type: ignore[operator]
            net(data(2 * step + part)).square().mean().backward()
        optimizer.step()


def averages_at_times(period: int) -> None:
    """Average not gradients between replicas, but parameters, every few steps."""
    mesh = grid()
    net = sharded(mesh["shard"])

    def average(step: int) -> None:
        if step % period == period - 1:
            for parameter in net.parameters():
                assert isinstance(parameter, DTensor)
                local = parameter.to_local().detach()
                dist.all_reduce(local, group=mesh.get_group("replicate"))
                local /= 2

    trains(net, average)


def averages_every_other_step() -> None:
    averages_at_times(2)


def averages_once_at_the_end() -> None:
    averages_at_times(4)


def sends_parameters_at_the_end() -> None:
    """One replica's parameters replace the other's after the last step."""
    layer = Sharded()
    trains(layer)
    weight = layer.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local().detach()
    if dist.get_rank() < 2:
        dist.send(local, dist.get_rank() + 2)
    else:
        dist.recv(local, dist.get_rank() - 2)


def splits_and_shards() -> None:
    """Tensor parallelism along one dimension of the mesh with a replicated norm, FSDP along one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Sigmoid())
    mesh = grid()
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(),
    }
    parallelize_module(net, mesh["shard"], plan)  # type: ignore[arg-type]
    fully_shard(net, mesh=mesh["replicate"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(
            6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank() // 2)
        )
        net(x).square().mean().backward()
        optimizer.step()


def reduces_by_hand() -> None:
    mesh = grid()
    net = sharded(mesh["shard"])

    def reduce(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("replicate"))

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    trains(net)


def passes_stages_on() -> None:
    """Two stages, whose layers begin alike, each on two ranks."""
    net, rank = sharded(grid()["shard"]), dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        x = data(step)
        if rank >= 2:
            dist.recv(x, rank - 2)
            x.requires_grad_()
        y = net(x)
        if rank < 2:
            dist.send(y.detach(), rank + 2)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 2)
            y.backward(gradient)
        else:
            y.square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, rank - 2)
        optimizer.step()


RIGHT = [
    reduces_by_hand,
    passes_stages_on,
    trains_hybrid,
    accumulates,
    averages_every_other_step,
    averages_once_at_the_end,
    sends_parameters_at_the_end,
    splits_and_shards,
]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_equal_copies_are_no_finding(program: Callable[[], None]) -> None:
    assert findings(program) == []
