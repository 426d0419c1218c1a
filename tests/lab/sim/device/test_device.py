"""The time and FLOPs that a device counts; test_memory covers its memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from distlab.sim.device.device import Device


@dataclass
class ToyGpu:
    """A GPU that is memory-bound below 1 FLOP per byte in float32, and below 4 in bfloat16."""

    memory_bytes: float = 1e15
    memory_bytes_per_s: float = 1000.0
    achievable_flops: Mapping[str, float] = field(
        default_factory=lambda: {"float32": 1000.0, "bfloat16": 4000.0}
    )


class Clock:
    """A clock that records each call that advances it."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []

    def advance(self, seconds: float, name: str) -> None:
        self.calls.append((seconds, name))

    @property
    def now_s(self) -> float:
        return sum(seconds for seconds, _ in self.calls)


@contextmanager
def running(**options: Any) -> Iterator[tuple[Device, Clock]]:
    clock = Clock()
    with Device(ToyGpu(), advance=clock.advance, **options) as device:
        yield device, clock


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_a_gradient_has_the_bits_that_torch_gives_it(function: Callable[..., Any]) -> None:
    """The gradients of both have a kernel, and a formula of other operations that rounds more."""

    def gradient() -> torch.Tensor:
        x = torch.linspace(-4, 4, 1001).requires_grad_()
        function(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient()
    with running():
        assert torch.equal(gradient(), expected)


def test_an_operation_takes_as_long_as_its_slower_part() -> None:
    square, row, other = torch.ones(100, 100), torch.ones(1, 100), torch.ones(100, 100)
    with running() as (device, clock):
        square @ other
        row @ square
    assert clock.calls == [
        (2 * 100**3 / 1000, "mm"),  # compute-bound; its 120,000 bytes take 120 s
        (4 * (100 + 10_000 + 100) / 1000, "mm"),  # memory-bound; its 20,000 FLOPs take 20 s
    ]
    assert device.flops == 2 * 100**3 + 20_000
    assert device.bytes_moved == 120_000 + 40_800


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.5, 1.0, 3.0]))
@settings(
    derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
def test_the_roofline(n: int, m: int, k: int, slowdown: float) -> None:
    for dtype, rate in ((torch.float32, 1000.0), (torch.bfloat16, 4000.0)):
        a, b = torch.ones(n, m, dtype=dtype), torch.ones(m, k, dtype=dtype)
        with running(slowdown=slowdown) as (_, clock):
            a @ b
        traffic = (n * m + m * k + n * k) * a.itemsize / 1000
        assert clock.now_s == max(2 * n * m * k / rate, traffic) * slowdown


def test_without_a_gpu_compute_is_free_and_memory_is_not() -> None:
    clock = Clock()
    with Device(None, advance=clock.advance) as device:
        x = torch.ones(100) * 2
        assert device.memory.live_bytes == 400
    assert clock.calls == []
    assert x.sum() == 200


# --- transformers --------------------------------------------------------------------------------


def attend(device: str, *, kv_heads: int = 4, **options: Any) -> None:
    q = torch.ones(2, 4, 8, 16, device=device, requires_grad=True)
    k, v = (torch.ones(2, kv_heads, 8, 16, device=device, requires_grad=True) for _ in "kv")
    F.scaled_dot_product_attention(q, k, v, **options).sum().backward()


def masked(device: str, dtype: torch.dtype, **options: Any) -> None:
    attend(device, attn_mask=torch.ones(8, 8, dtype=dtype, device=device), **options)


FORWARD = 4 * 2 * 4 * 8 * 8 * 16  # two matrix products in four heads of two samples


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (attend, 3 * FORWARD),
        (lambda d: attend(d, is_causal=True), 3 * FORWARD // 2),
        (lambda d: attend(d, scale=0.5), 3 * FORWARD),
        (lambda d: attend(d, kv_heads=2, enable_gqa=True), 3 * FORWARD),
        # With dropout, attention is not fused, so a causal mask saves nothing.
        (lambda d: attend(d, dropout_p=0.5), 3 * FORWARD),
        (lambda d: attend(d, dropout_p=0.5, is_causal=True), 3 * FORWARD),
        (lambda d: masked(d, torch.bool), 3 * FORWARD),
        (lambda d: masked(d, torch.float32), 3 * FORWARD),
        (lambda d: masked(d, torch.bool, dropout_p=0.5), 3 * FORWARD),
    ],
)
def test_attention_costs_the_same_on_cpu_and_meta(
    program: Callable[[str], None], expected: int, device_type: str
) -> None:
    with running() as (device, _):
        program(device_type)
    assert device.flops == expected


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_a_transformer_layer_costs_what_the_formula_says(device_type: str) -> None:
    """Without a causal mask, expect 24 b s h^2 (1 + s / 6h) FLOPs forward, and twice that backward.

    Source: Narayanan et al. 2021 (Megatron-LM), appendix.
    """
    batch, length, width = 2, 24, 32
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, batch_first=True, device=device_type
    )
    x = torch.ones(batch, length, width, device=device_type, requires_grad=True)
    with running() as (device, _):
        out = layer(x)
        forward = device.flops
        out.sum().backward()
    assert forward == 24 * batch * length * width**2 * (1 + length / (6 * width))
    assert device.flops == 3 * forward
