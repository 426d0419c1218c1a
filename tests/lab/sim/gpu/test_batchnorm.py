"""SyncBatchNorm on simulated GPUs computes what BatchNorm does on the batches of all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim import Options, simulate

NCCL = Options(semantics="nccl")
ROWS = [2, 5]  # of each rank's batch
Norm = Callable[..., nn.Module]


def whole_batch() -> Tensor:
    torch.manual_seed(1)
    return 3 * torch.randn(sum(ROWS), 3, 4, 4, dtype=torch.float64) + 1


def normalized(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """Return results, gradients and statistics of a layer, for the sum of squares as loss."""
    norm, x = norm.to(x.device, x.dtype), x.detach().requires_grad_()
    y = norm(x)
    y.pow(3).sum().backward()
    gradients = [parameter.grad for parameter in norm.parameters()]
    found = [y.detach(), x.grad, *norm.buffers(), *gradients]
    return [value.cpu() for value in found if value is not None]


def of_one_rank(**options: Any) -> list[Tensor]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    x = whole_batch().split(ROWS)[rank].cuda()
    return normalized(nn.SyncBatchNorm(3, **options), x)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_ranks_normalize_as_one_batch(options: dict[str, Any]) -> None:
    ran = simulate(lambda: of_one_rank(**options), 2, cluster="dgx-h100", options=NCCL)
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    y, dx, *rest = normalized(nn.BatchNorm2d(3, **options), whole_batch())
    first, second = ran.results
    torch.testing.assert_close(torch.cat([first[0], second[0]]), y)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), dx)
    num_buffers = 3 * (options.get("track_running_stats", True))
    for number, (a, b, whole) in enumerate(zip(first[2:], second[2:], rest, strict=True)):
        torch.testing.assert_close(a if number < num_buffers else a + b, whole)


def in_16_bits() -> list[torch.dtype]:
    torch.cuda.set_device(dist.get_rank())
    norm, x = nn.SyncBatchNorm(3).cuda(), torch.ones(2, 3, device="cuda", dtype=torch.float16)
    y = norm(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None
    return [y.dtype, x.grad.dtype, norm.weight.grad.dtype]


def test_results_have_the_dtype_of_the_input() -> None:
    ran = simulate(in_16_bits, 2, cluster="dgx-h100", options=NCCL)
    assert ran.results[0] == [torch.float16, torch.float16, torch.float32]
