"""The split layers of Phase 2 in autocast and compiled, and blocks that gather again."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from distlab import launch
from distlab.sim import Simulated
from phase2_advanced.given import Block
from solutions.phase2_advanced import tensor_parallel

RANKS = 2
FULL = [(name, parameter.shape) for name, parameter in Block(8, 4).named_parameters()]


def block_on_positions(gather_again: bool) -> list[list[float]]:
    """Return the flat gradients of a block's input and parameters."""
    torch.manual_seed(0)
    block, x = Block(8, 4).double(), torch.randn(2, 6, 8, dtype=torch.float64)
    tensor_parallel.parallelize_block(block, gather_again=gather_again)
    x = x.chunk(RANKS, 1)[dist.get_rank()].clone().requires_grad_()
    block(x).square().sum().backward()
    return [gradient.flatten().tolist() for gradient in gradients_of(block, x)]


def gradients_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [p.grad for p in (x, *module.parameters()) if p.grad is not None]


def test_gathering_again_costs_two_all_gathers_and_changes_no_gradient() -> None:
    kept, again = (launch.simulate(block_on_positions, RANKS, flag) for flag in (False, True))
    assert again.results == kept.results
    assert len(kept.results[0]) == 1 + len(FULL)
    assert [num_gathers(kept), num_gathers(again)] == [4, 6]


def num_gathers(run: Simulated[Any]) -> int:
    calls = [event.name for event in run.trace.events if event.kind == "collective"]
    return calls.count("all_gather") // RANKS


def plain_products(
    x: Tensor, layers: list[nn.Linear], entrance: tensor_parallel._Entrance
) -> dict[nn.Module, Tensor]:
    whole = entrance.enter(x, entrance.group)
    return {layer: F.linear(whole, layer.weight, layer.bias) for layer in layers}


def differences_under_autocast() -> list[float]:
    """Compare the gradients under autocast with those that torch computes."""
    found = []
    for products in (tensor_parallel._products, plain_products):
        with mock.patch.object(tensor_parallel, "_products", products):
            torch.manual_seed(0)
            block, x = Block(8, 4), torch.randn(2, 6, 8, requires_grad=True)
            tensor_parallel.parallelize_attention(block.attention)
            tensor_parallel.parallelize_mlp(block.mlp)
            with torch.autocast("cpu", torch.bfloat16):
                y = block(x)
            y.float().square().sum().backward()
            found.append(gradients_of(block, x))
    assert {gradient.dtype for gradient in found[0]} == {torch.float32}
    return [float((ours - torchs).abs().max()) for ours, torchs in zip(*found, strict=True)]


def test_autocast_gives_the_gradients_that_torch_computes() -> None:
    for differences in on_ranks(differences_under_autocast, RANKS):
        assert differences == (1 + len(FULL)) * [0.0]


def compiled_gradients() -> list[bool]:
    block, x = Block(8, 4), torch.randn(2, 6, 8, requires_grad=True)
    tensor_parallel.parallelize_attention(block.attention)
    tensor_parallel.parallelize_mlp(block.mlp)
    found = []
    for call in (block, torch.compile(block, backend="eager", fullgraph=True)):
        block.zero_grad()
        x.grad = None
        call(x).square().sum().backward()
        found.append(gradients_of(block, x))
    return [torch.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True)]


def test_a_split_block_is_compiled_as_one_graph() -> None:
    assert on_ranks(compiled_gradients, 1) == [(1 + len(FULL)) * [True]]
