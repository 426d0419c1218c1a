"""FLOPs and bytes of single operations, checked against independent counts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from distlab.sim.device.flops import describe, op_cost, tensors_in

aten = torch.ops.aten
sizes = st.integers(1, 5)
repeatable = settings(
    derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)


class Recorder(TorchDispatchMode):
    """A dispatch mode that adds up the FLOPs and bytes of each kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids importing torch.compile, which takes 2 s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        op = describe(func)
        cost = op_cost(op, args, kwargs or {}, out)
        self.flops[op.name] += cost.flops
        self.bytes[op.name] += cost.bytes
        return out


def flops(fn: Callable[[], object]) -> int:
    with Recorder() as recorder:
        fn()
    return recorder.flops.total()


def moved(fn: Callable[[], object]) -> int:
    with Recorder() as recorder:
        fn()
    return recorder.bytes.total()


# --- products ------------------------------------------------------------------------------------

a, b = torch.ones(2, 3), torch.ones(3, 5)
batch_a, batch_b = torch.ones(4, 2, 3), torch.ones(4, 3, 5)


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda: a @ b, 2 * 2 * 3 * 5),
        (lambda: a @ torch.ones(3), 2 * 2 * 3),
        (lambda: torch.ones(3) @ torch.ones(3), 2 * 3),
        (lambda: batch_a @ batch_b, 4 * 2 * 2 * 3 * 5),
        (lambda: torch.baddbmm(torch.ones(5), batch_a, batch_b), 4 * 2 * 2 * 3 * 5),
        (lambda: torch.addmv(torch.ones(2), a, torch.ones(3)), 2 * 2 * 3),
        (lambda: torch.ones(2, 5).addmm_(a, b), 2 * 2 * 3 * 5),
        (lambda: torch.mm(a, b, out=torch.ones(2, 5)), 2 * 2 * 3 * 5),
        (lambda: F.linear(batch_a, b.t(), torch.ones(5)), 4 * 2 * 2 * 3 * 5),
    ],
)
def test_matrix_products_of_every_kind(product: Callable[[], object], expected: int) -> None:
    assert flops(product) == expected


@given(sizes, sizes, sizes, sizes)
@repeatable
def test_products_agree_with_torch_where_torch_is_right(n: int, m: int, k: int, j: int) -> None:
    def program() -> None:
        x = torch.ones(n, m, requires_grad=True)
        (x @ torch.ones(m, k) @ torch.ones(n, k, j)).sum().backward()
        F.conv1d(torch.ones(n, m, 8), torch.ones(k, m, 3, requires_grad=True)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        program()
    assert flops(program) == counter.get_total_flops()


@given(
    convolve=st.sampled_from([F.conv1d, F.conv2d, F.conv_transpose1d, F.conv_transpose2d]),
    batch=sizes,
    c_in=sizes,
    c_out=sizes,
    groups=st.integers(1, 3),
    kernel=sizes,
    size=sizes,
)
@repeatable
def test_a_convolution_of_ones_counts_its_own_products(
    convolve: Any, batch: int, c_in: int, c_out: int, groups: int, kernel: int, size: int
) -> None:
    """Without padding, each product is 1, so the sum of the result is the number of products."""
    assume(size >= kernel)
    is_transposed, dims = "transpose" in convolve.__name__, int(convolve.__name__[-2])
    channels = (c_in * groups, c_out) if is_transposed else (c_out * groups, c_in)
    x = torch.ones(batch, c_in * groups, *[size] * dims, requires_grad=True)
    weight = torch.ones(*channels, *[kernel] * dims, requires_grad=True)
    with Recorder() as recorder:
        out = convolve(x, weight, stride=2, groups=groups)
        grads = torch.autograd.grad(out.sum(), (x, weight))
    assert recorder.flops["convolution"] == 2 * out.sum()
    assert recorder.flops["convolution_backward"] == 2 * sum(grad.sum() for grad in grads)


# --- bytes ---------------------------------------------------------------------------------------

N = 4 * 100  # bytes in a vector of 100 float32 values
x, y = torch.ones(100), torch.ones(100)
table = torch.ones(1000, 25)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda: x + y, 3 * N),
        (lambda: x + x, 2 * N),
        (lambda: x.add_(y), 3 * N),
        (lambda: torch.add(x, y, out=torch.empty(100)), 3 * N),
        (lambda: x.copy_(y), 2 * N),
        (lambda: x.fill_(1.0), N),
        (lambda: torch.ones(100), N),
        (lambda: x.clone(), 2 * N),
        (lambda: x.to(torch.bfloat16), N + N // 2),
        (lambda: x.sum(), N + 4),
        (lambda: x[:50] + y[50:], 3 * N // 2),
        (lambda: torch.ones(()).expand(100) + y, 4 + 4 + 2 * N),
        (lambda: torch._foreach_add_([x, x.view(-1)], [y, y.view(-1)]), 6 * N),
        (lambda: torch.cat([x, y]), 4 * N),
        (lambda: F.embedding(torch.tensor([1, 2, 3, 4]), table), 4 * 8 + 2 * N),
        (lambda: table[torch.tensor([1, 2, 3, 4])], 4 * 8 + 2 * N),
        (lambda: torch.ones(0).expand(3, 0) + 1, 0),
    ],
)
def test_bytes_read_and_written(operation: Callable[[], object], expected: int) -> None:
    assert moved(operation) == expected


@pytest.mark.parametrize(
    "operation",
    [
        lambda: x.view(10, 10).t()[2:].unsqueeze(0).expand(3, 8, 10).detach(),
        lambda: torch.ones(0).reshape(0).squeeze(),
        lambda: x.split(10),
        lambda: torch.empty_like(x),
        lambda: torch.empty(100).resize_(10),
        lambda: torch.empty(2, 5).t_().unsqueeze_(0).detach_(),
        lambda: x[3].item(),
    ],
)
def test_views_metadata_and_bare_allocations_move_nothing(operation: Callable[[], object]) -> None:
    assert moved(operation) == 0


def test_a_sparse_gradient_is_counted_by_its_parts() -> None:
    layer = nn.Embedding(1000, 25, sparse=True)
    assert moved(lambda: layer(torch.tensor([1, 2])).sum().backward()) < 1000
    assert tensors_in([layer.weight.grad, [x, (y,)], 3]) == [x, y]
