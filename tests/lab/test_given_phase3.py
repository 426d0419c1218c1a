"""Checks in the given code of Phase 3; the judges run the rest of that code."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, refusal
from torch import Tensor, nn

from phase3_multi_node.given import (
    LinkCost,
    SavesShard,
    Topology,
    at_end_of_backward,
    check_has_values,
    clip_shards,
    node_groups,
    units_of,
)
from solutions.phase3_multi_node import zero


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally many ranks, got \[2, 1\]"):
        node_groups(["a", "b", "a"])


def test_a_topology_sorts_its_ranks_by_host() -> None:
    topology = Topology(("b", "a", "b"), LinkCost(1.0, 0.5), None)
    assert topology.nodes == ((0, 2), (1,))
    assert topology.inside is not None
    assert topology.inside.seconds(4) == 3.0


def test_a_module_without_values_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight is on the device meta.*to_empty"):
        check_has_values(module)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False, device="meta"))
    with pytest.raises(ValueError, match=r"0\.running_mean is on the device meta"):
        check_has_values(module)
    check_has_values(module.to_empty(device="cpu"))


class Registers(torch.autograd.Function):
    """Passes a value on; its backward pass registers a function twice, and then may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any, fails: bool) -> Tensor:
        ctx.call, ctx.fails = call, fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        at_end_of_backward(ctx.call)
        at_end_of_backward(ctx.call)
        if ctx.fails:
            raise ValueError("a bug in a backward pass")
        return gradient, None, None


def test_each_backward_pass_calls_a_function_once_even_after_one_that_failed() -> None:
    calls, x = list[int](), torch.ones((), requires_grad=True)
    note = partial(calls.append, 1)
    with pytest.raises(ValueError, match="a bug"):
        Registers.apply(x, note, True).backward()
    calls.clear()
    for number in (1, 2):
        Registers.apply(x, note, False).backward()
        assert len(calls) == number


def test_a_parameter_used_inside_and_outside_a_unit_belongs_to_the_model() -> None:
    layers = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3))
    model = torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(3, 5)})
    model["head"].weight = layers[0].weight
    units = {unit: [place.path for place in places] for unit, places in units_of(model).items()}
    assert units == {
        model: ["layers.0.weight", "head.weight", "head.bias"],
        layers[1]: ["layers.1.weight", "layers.1.bias"],
    }


def test_a_layer_that_a_list_holds_twice_is_one_unit() -> None:
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    assert [*units_of(model)] == [layer]


def clipped(max_norm: float) -> tuple[list[float], float]:
    """Clip this rank's shards of two gradients; return what is left of them, and the norm."""
    rank = dist.get_rank()
    shards = [torch.tensor([3.0, 0.0]) * (rank == 0), torch.tensor([4.0]) * (rank == 1)]
    norm = clip_shards(shards, max_norm)
    return torch.cat(shards).tolist(), float(norm)


@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 0.2), (10.0, 1.0)])
def test_shards_are_clipped_by_the_norm_of_all(max_norm: float, scale: float) -> None:
    (first, norm), (second, other_norm) = on_ranks(clipped, 2, max_norm)
    assert norm == other_norm == 5.0
    assert first == pytest.approx([3 * scale, 0.0, 0.0], rel=1e-6)
    assert second == pytest.approx([0.0, 0.0, 4 * scale], rel=1e-6)


def trained(stage: type[zero.ShardedOptimizer], restart: bool) -> list[float]:
    """Train three steps in bfloat16, if need be with new objects from a state before the last."""
    torch.manual_seed(0)
    model, state = nn.Linear(3, 3).bfloat16(), None
    for step in range(3):
        if step == 0 or (restart and step == 2):
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            model = nn.Linear(3, 3).bfloat16()
            model.load_state_dict(kept)
            optimizer = stage(model.parameters(), torch.optim.Adam, lr=1e-3)
            if state:
                optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(torch.full((1, 3), dist.get_rank() + step + 1.0).bfloat16()).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
    return torch.cat([master.flatten() for master in optimizer.masters]).tolist()


@pytest.mark.parametrize("stage", [zero.ShardedOptimizer, zero.ShardedGradientOptimizer])
def test_a_sharded_optimizer_goes_on_from_its_state(stage: type[zero.ShardedOptimizer]) -> None:
    assert on_ranks(trained, 2, stage, True) == on_ranks(trained, 2, stage, False)


def refused(change: dict[str, int]) -> str:
    optimizer: SavesShard = zero.ShardedOptimizer(nn.Linear(3, 3).parameters(), torch.optim.SGD)
    return refusal(lambda: optimizer.load_state_dict({**optimizer.state_dict(), **change}))


def test_a_shard_of_others_is_refused() -> None:
    told = on_ranks(refused, 2, {"num_ranks": 4})
    assert "expected the shard of rank 1 of 2, got that of rank 1 of 4" in told[1]
    assert "got that of rank 1 of 2" in on_ranks(refused, 2, {"rank": 1})[0]
