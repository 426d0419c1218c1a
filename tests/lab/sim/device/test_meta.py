"""A cached call on meta tensors gives the same results as torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_device import ToyGpu
from torch import Tensor, nn

from distlab.sim.device import meta_cache as meta
from distlab.sim.device.device import Device


def on_device(program: Callable[[], Any]) -> tuple[Any, int, int, dict[str, int], list[Any]]:
    """Run a program on a device; return its result and everything that the device counted."""
    times: list[Any] = []
    with Device(ToyGpu(), advance=lambda *call: times.append(call)) as device:
        out = program()
        seen = device.memory.live_by_category
    return out, device.flops, device.bytes_moved, seen, times


def empty(*shape: int, **options: Any) -> Tensor:
    return torch.empty(*shape, device="meta", **options)


def described(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad, value.device.type
    if isinstance(value, list | tuple):
        return type(value), [described(item) for item in value]
    return value


def add_to_itself() -> Tensor:
    x = empty(4, 8)
    return x + x


def train_a_step() -> list[Tensor | None]:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()).to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    F.dropout(model(empty(3, 8)), 0.5).sum().backward()
    optimizer.step()
    return [p.grad for p in model.parameters()]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "sum": lambda: empty(4, 8) + empty(8),
    "sum in other strides": lambda: empty(8, 4).t() + empty(8),
    "sum of one tensor": add_to_itself,
    "sum with an int": lambda: empty(4, dtype=torch.int32) + 1,
    "sum with a float": lambda: empty(4, dtype=torch.int32) + 1.0,
    "product": lambda: empty(4, 8) @ empty(8, 2),
    "product of broadcast rows": lambda: empty(1, 8).expand(4, 8) @ empty(8, 2),
    "in place": lambda: empty(4).add_(2.0),
    "several results": lambda: torch.max(empty(3, 4), dim=1),
    "a list of results": lambda: torch._foreach_add([empty(2), empty(3)], 1.0),
    "results that are views": lambda: torch.unsafe_chunk(empty(4, 2), 2),
    "keyword arguments": lambda: torch.zeros_like(empty(3), dtype=torch.float64),
    "into another": lambda: torch.add(empty(3), 1, out=empty(3)),
    "attention": lambda: F.scaled_dot_product_attention(*[empty(2, 4, 8, 16)] * 3, is_causal=True),
    "one step": train_a_step,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_second_time_gives_what_the_first_gave(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta, "_calls", {})
    program = PROGRAMS[name]
    plain = program()
    first, *seen_first = on_device(program)
    second, *seen_second = on_device(program)
    assert described(plain) == described(first) == described(second)
    assert seen_first == seen_second


def test_results_are_tensors_of_their_own() -> None:
    results = [on_device(PROGRAMS["sum"])[0] for _ in range(3)]
    assert len({id(tensor.untyped_storage()) for tensor in results}) == 3


def test_an_operation_that_torch_refuses_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            on_device(lambda: empty(2, 3) @ empty(2, 3))


def test_not_more_is_remembered_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "_calls", {})
    monkeypatch.setattr(meta, "_MOST_CALLS", 5)
    on_device(lambda: [empty(n) + 1 for n in range(1, 20)])
    assert len(meta._calls) <= 5
