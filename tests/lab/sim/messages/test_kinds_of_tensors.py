"""Tensors that gloo or NCCL cannot send are rejected, but tensors without data are accepted."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import me, neighbours, size

from distlab import launch
from distlab.sim import Options, RankError, simulate

# The names of torch 2.13, or the old ones
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
STRIDED = torch.arange(12.0).view(3, 4).t()  # 4 x 3


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "all_reduce": (lambda: dist.all_reduce(STRIDED.clone().t()[::2]), "contiguous"),
    "broadcast": (lambda: dist.broadcast(torch.ones(4, 4)[:, 1], 0), "contiguous"),
    "reduce": (lambda: dist.reduce(torch.ones(4, 4)[:, 1], 0), "contiguous"),
    "all_gather": (lambda: dist.all_gather([torch.ones(4, 3)] * 3, STRIDED), "contiguous"),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.ones(4, 3), [STRIDED] * 3),
        "contiguous",
    ),
    "send": (lambda: dist.send(STRIDED, neighbours()[0]), "contiguous"),
    "mean of integers": (
        lambda: dist.all_reduce(torch.ones(3).int(), dist.ReduceOp.AVG),
        "gloo and NCCL have no AVG of",
    ),
    "and of floats": (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND), "BAND"),
    "sum of int16": (lambda: dist.all_reduce(torch.ones(3).short()), "int16"),
    "scaled sum": (
        lambda: dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0)),
        "only NCCL has the reduction PREMUL_S",
    ),
    "all-gather of rows": (
        lambda: ALL_GATHER(torch.ones(3, 4), torch.ones(4)),
        "beside a tensor of shape (4,), gloo needs one of shape (12,), got (3, 4): pass .view(12)",
    ),
    "reduce-scatter of rows": (
        lambda: REDUCE_SCATTER(torch.ones(2, 4), torch.ones(3, 2, 4)),
        "gloo needs one of shape (6, 4), got (3, 2, 4): pass .view(6, 4) of it",
    ),
    "all-gather of a number": (
        lambda: ALL_GATHER(torch.ones(3), torch.ones(())),
        "pass .view(1) of it, and .view(3) of the other",
    ),
    "sparse": (
        lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
        "all_reduce needs a dense",
    ),
}


def refusals() -> dict[str, str]:
    refused = {}
    for name, (call, _) in REFUSED.items():
        try:
            call()
        except RuntimeError as error:
            refused[name] = str(error)
    dist.barrier()
    return refused


def test_what_gloo_or_nccl_cannot_do_is_refused_at_the_call() -> None:
    for refused in simulate(refusals, 3).results:
        missing = [n for n, (_, words) in REFUSED.items() if words not in refused.get(n, "")]
        assert missing == [], refused


def adds_sparse_rows() -> list[list[float]]:
    table = torch.zeros(4, 2)
    table[me()] = 1.0 + me()
    table[3] = 1.0
    rows = table.to_sparse()
    work = dist.all_reduce(rows, async_op=True)
    assert work is not None
    work.wait()
    total: list[list[float]] = rows.to_dense().tolist()
    return total


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_sparse_tensors_are_added_up(world: str) -> None:
    expected = [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [2.0, 2.0]]
    assert launch.run(adds_sparse_rows, 2, backend=world, timeout_s=600) == [expected] * 2


def test_of_a_sparse_tensor_only_what_it_holds_is_sent() -> None:
    run = simulate(adds_sparse_rows, 2, options=Options(algorithm="ring"))
    held = 2 * 2 * (2 * 8 + 4)  # two rows of two numbers; each number has two indices
    assert run.trace.bytes_sent == [held] * 2


def scatters_unequal_parts() -> list[float]:
    parts = [torch.arange(float(k + 1)) + me() for k in range(size())]
    mine = torch.zeros(me() + 1)
    dist.reduce_scatter(mine, parts)
    return mine.tolist()


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_ranks_may_get_parts_of_different_sizes(world: str) -> None:
    found = launch.run(scatters_unequal_parts, 3, backend=world, timeout_s=600)
    assert found == [[3.0], [3.0, 6.0], [3.0, 6.0, 9.0]]


def expects_another_part() -> None:
    dist.reduce_scatter(torch.zeros(3), [torch.ones(2), torch.ones(3)])


def test_the_own_part_has_the_shape_of_the_output() -> None:
    with pytest.raises(RankError, match=r"the one at index 0 has the shape of the output, \(3,\)"):
        simulate(expects_another_part, 2)


def communicates(device: str) -> list[tuple[int, ...]]:
    new = partial(torch.ones, device=device)
    x, gathered = new(1000, 1000), [new(1000, 1000) for _ in range(size())]
    right, left = neighbours()
    dist.broadcast(x, 0)
    dist.all_reduce(x)
    dist.reduce(x, 0)
    dist.all_gather(gathered, x)
    dist.gather(x, gathered if me() == 0 else None, 0)
    dist.scatter(x, gathered if me() == 0 else None, 0)
    dist.reduce_scatter(x, gathered)
    dist.all_to_all(gathered, [new(1000, 1000) for _ in range(size())])
    dist.all_to_all_single(new(1000 * size()), new(1000 * size()))
    work = dist.isend(x, right)
    dist.recv(new(1000, 1000), left)
    work.wait()
    return [tuple(x.shape), *(tuple(y.shape) for y in gathered)]


def test_tensors_without_data_take_the_time_and_bytes_of_real_ones() -> None:
    shapes, numbers = simulate(communicates, 4, "meta"), simulate(communicates, 4, "cpu")
    assert shapes.results == numbers.results == [[(1000, 1000)] * 5] * 4
    assert shapes.trace.bytes_sent == numbers.trace.bytes_sent
    assert shapes.seconds == numbers.seconds > 0
    assert math.isfinite(shapes.seconds)
