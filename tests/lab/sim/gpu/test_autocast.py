"""Autocast on simulated GPUs has CUDA's lists and ends with the world; the scaler waits once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distlab.sim import Options, simulate
from distlab.sim.reporting.sites import Site
from distlab.sim.results.simulated import Simulated

T = TypeVar("T")
HALF, FULL = torch.float16, torch.float32


def on_gpus(main: Callable[[], T], num_ranks: int = 1) -> Simulated[T]:
    return simulate(main, num_ranks, cluster="dgx-h100", options=Options(semantics="nccl"))


def dtype_of(operation: Callable[[Tensor], Tensor], **autocast: Any) -> torch.dtype:
    """Return the dtype of an operation's result under autocast, after its backward pass."""

    def main() -> torch.dtype:
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", **autocast):
            result = operation(x @ x)
        result.float().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert (x.grad.dtype, x.grad.is_cuda) == (FULL, True)
        return result.dtype

    return on_gpus(main).results[0]


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (lambda y: F.linear(y, torch.ones(3, 4, device="cuda")), HALF),
        (lambda y: F.conv1d(y[None], torch.ones(2, 4, 1, device="cuda")), HALF),
        (lambda y: torch.mv(y, torch.ones(4, device="cuda")), HALF),
        (F.relu, HALF),
        (lambda y: y.softmax(-1), FULL),
        (lambda y: F.layer_norm(y, (4,)), FULL),
        (lambda y: F.cross_entropy(y, torch.zeros(4, dtype=torch.int64, device="cuda")), FULL),
        (torch.sum, FULL),
        (lambda y: y.sum(dtype=HALF), HALF),
        (lambda y: y**2, FULL),
        (torch.exp, FULL),
        (lambda y: torch.addcmul(y, y, torch.ones(4, 4, device="cuda")), FULL),
    ],
)
def test_operations_compute_in_the_dtype_of_cudas_lists(
    operation: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    assert dtype_of(operation) is dtype


def test_a_dtype_and_a_nested_region_without_autocast_take_effect() -> None:
    assert dtype_of(F.relu, dtype=torch.bfloat16) is torch.bfloat16

    def without(y: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return y.float() @ y.float()

    assert dtype_of(without) is FULL
    assert dtype_of(F.relu, enabled=False) is FULL


def test_tensors_of_the_host_and_other_ranks_are_not_concerned() -> None:
    def main() -> tuple[torch.dtype, torch.dtype]:
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        x, on_host = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
        with torch.autocast("cuda", enabled=rank == 0):
            dist.all_reduce(x.clone())  # other ranks run meanwhile
            return (x @ x).dtype, (on_host @ on_host).dtype

    assert on_gpus(main, 2).results == [(HALF, FULL), (FULL, FULL)]


def test_the_program_sees_what_it_has_asked_for() -> None:
    def main() -> None:
        assert not torch.is_autocast_enabled("cuda")
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert not torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cuda") is torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                x = torch.ones(2, 2, device="cuda")
                assert (x @ x).dtype is torch.bfloat16
        assert torch.get_autocast_dtype("cuda") is HALF

    on_gpus(main)


def test_recomputation_and_custom_functions_keep_the_forward_passs_autocast() -> None:
    seen: list[torch.dtype] = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append((grad.float() @ x.float()).dtype)
            return grad.to(x.dtype)

    def block(x: Tensor) -> Tensor:
        y = x @ x
        seen.append(y.dtype)
        return y @ y

    def main() -> None:
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            y = checkpoint(block, x, use_reentrant=False)
            z = Square.apply(x)  # type: ignore[no-untyped-call]
        (y.float().sum() + z.float().sum()).backward()

    on_gpus(main)
    assert seen == [HALF] * 3


def test_binary_cross_entropy_is_refused_as_on_gpus() -> None:
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        dtype_of(lambda y: F.binary_cross_entropy(y.sigmoid(), torch.ones_like(y)))


def test_cpu_autocast_is_torchs_own_in_a_world_and_after_it() -> None:
    def main() -> list[torch.dtype]:
        x = torch.ones(4, 4)
        with torch.autocast("cpu"):
            return [(x @ x).dtype, (x @ x).softmax(-1).dtype]

    outside = main()
    assert on_gpus(main).results[0] == outside
    assert main() == outside == [torch.bfloat16, torch.bfloat16]


def test_ranks_cast_leaves_while_others_wait_for_them() -> None:
    def main() -> Tensor:
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        layer = nn.Linear(4, 4, bias=False, device="cuda")
        nn.init.eye_(layer.weight)
        x = torch.ones(2, 4, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            if rank > 0:
                dist.recv(x, rank - 1)
            x = layer(x.requires_grad_()).float()
            if rank < 2:
                dist.send(x.detach() + 1, rank + 1)
        return x.detach().cpu()

    assert [result[0, 0].item() for result in on_gpus(main, 3).results] == [1, 2, 3]


def test_a_step_with_a_gradient_scaler_waits_once_and_skips_infinite_gradients() -> None:
    def main() -> tuple[float, bool]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 4).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        before = model.module.weight.detach().clone()
        for factor in (1.0, 1e30):
            kept = model.module.weight.detach().clone()
            with torch.autocast("cuda"):
                loss = model(torch.ones(2, 4, device="cuda")).sum()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        is_right = not kept.equal(before) and kept.equal(model.module.weight)
        return scaler.get_scale(), is_right

    world = on_gpus(main, 2)
    assert world.results == [(2.0**7, True)] * 2
    assert world.gpu_time is not None
    items = [wait for wait in world.gpu_time.host_waits if wait.reason.startswith(".item()")]
    per_step = [wait.count for wait in items if "scaler.step" in _line_of(wait.site)]
    assert per_step == [2, 2], "each rank waits once per step, for found_inf"


def _line_of(site: Site) -> str:
    return Path(__file__).read_text().splitlines()[site[1] - 1]
