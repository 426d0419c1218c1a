"""Casts and copies between the host and simulated GPUs, forward and backward."""

import pytest
import torch
from torch import nn

from distlab.sim import Options, simulate

NCCL = Options(semantics="nccl")


def test_casts_stay_on_the_gpu_without_making_the_host_wait() -> None:
    def main() -> None:
        x = torch.zeros(2, 2, device="cuda", requires_grad=True)
        half = x.half()
        for y in (half, x.type_as(half), half.softmax(-1, dtype=torch.float32)):
            assert y.is_cuda
        half.sum().float().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert (x.grad.is_cuda, x.grad.dtype) == (True, torch.float32)

    time = simulate(main, 1, cluster="dgx-h100", options=NCCL).gpu_time
    assert time is not None
    assert time.host_waits == []


def test_gradients_go_back_to_where_the_tensors_came_from() -> None:
    def main() -> list[str]:
        leaves = [torch.ones(2, device=name, requires_grad=True) for name in ("cpu", "cuda:0")]
        for leaf, place in zip(leaves, ("cuda:0", "cpu"), strict=True):
            leaf.to(place).sum().backward()  # type: ignore[no-untyped-call]
        return [str(leaf.grad.device) for leaf in leaves if leaf.grad is not None]

    assert simulate(main, 1, cluster="dgx-h100", options=NCCL).results == [["cpu", "cuda:0"]]


def test_a_model_on_two_gpus_trains_without_explicit_synchronization() -> None:
    def main() -> None:
        front, back = (nn.Linear(2, 2, device=f"cuda:{index}") for index in range(2))
        x = torch.ones(2, 2, device="cuda:0")
        back(front(x).to("cuda:1")).sum().backward()
        for module in (front, back):
            assert module.weight.grad is not None
            assert module.weight.grad.device == module.weight.device
        with torch.no_grad():
            front.weight.copy_(back.weight)

    time = simulate(main, 1, cluster="dgx-h100", options=NCCL).gpu_time
    assert time is not None
    assert time.wrong == []


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_tensor_that_is_printed_is_read_by_the_host(shape: tuple[int, ...]) -> None:
    def main() -> str:
        return str(torch.ones(shape, device="cuda") + 1)

    ran = simulate(main, 1, cluster="dgx-h100", options=Options(semantics="nccl"))
    (shown,) = ran.results
    assert shown.startswith("tensor(")
    assert "cuda:0" in shown
    assert ran.gpu_time is not None
    assert sum(wait.count for wait in ran.gpu_time.host_waits) > 0
