"""NCCL's part of a process group: its options, and the sums that only NCCL has."""

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_gpus import ones, refusal, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distlab.lessons import given_2, given_3, given_4
from distlab.sim import Options, simulate

torch_dist: Any = dist  # the stubs lack what a build without CUDA lacks


def make_options() -> Any:
    options = torch_dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    return options


def test_options_of_nccl_are_accepted_and_kept() -> None:
    def main() -> list[Any]:
        dist.init_process_group("nccl", pg_options=make_options())
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
        other = dist.new_group(pg_options=make_options(), timeout=timedelta(seconds=30))
        plain = dist.new_group()
        backends: list[Any] = [g._get_backend(device) for g in (dist.group.WORLD, other, plain)]
        assert all(isinstance(b, torch_dist.ProcessGroupNCCL) for b in backends)
        assert backends[0].name() == "nccl"
        assert backends[0].options.config.max_ctas == 8
        backends[0].register_mem_pool(torch.cuda.MemPool(backends[0].mem_allocator), symm=True)
        assert copy.copy(backends[0]).size() == 2
        x = ones()
        dist.all_reduce(x, group=other)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50), plain)
        limits = [b.options._timeout.total_seconds() for b in backends]
        return [x.item(), [b.options.is_high_priority_stream for b in backends], limits]

    options = Options(semantics="nccl")
    ran = simulate(main, 2, cluster="dgx-h100", options=options, joined=False)
    assert ran.results == [[2.0, [True, True, False], [600.0, 30.0, 50.0]]] * 2
    assert not hasattr(dist, "ProcessGroupNCCL")


def test_each_device_of_a_group_has_its_backend() -> None:
    def main() -> None:
        gpu, cpu = torch.device("cuda"), torch.device("cpu")
        both = dist.new_group(backend="cpu:gloo,cuda:nccl")
        world: Any = dist.group.WORLD
        assert both._get_backend(gpu).rank() == dist.get_rank()
        assert both._get_backend(cpu).size() == 2
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            world._get_backend(cpu)

    run(main)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("nccl", ("cuda:nccl", "cuda")),
        ("gloo", ("cpu:gloo,cuda:gloo", "cpu")),
        ("cpu:gloo,cuda:nccl", ("cpu:gloo,cuda:nccl", "cuda")),
        (None, ("cpu:gloo,cuda:nccl", "cuda")),
    ],
)
def test_lessons_send_from_the_device_that_has_nccl(
    backend: str | None, expected: tuple[str, str]
) -> None:
    def main() -> tuple[str, ...]:
        dist.init_process_group(backend)
        devices = {each.group_device().type for each in (given_2, given_3, given_4)}
        return dist.get_backend_config(), *devices

    options = Options(semantics="nccl")
    ran = simulate(main, 2, cluster="dgx-h100", options=options, joined=False)
    assert ran.results == [expected] * 2


def test_on_gloo_a_group_has_a_backend_too() -> None:
    def main() -> int:
        world: Any = dist.group.WORLD
        size: int = world._get_backend(torch.device("cpu")).size()
        return size

    assert simulate(main, 2).results == [2, 2]


def test_abort_of_a_group_of_nccl_is_accepted() -> None:
    run(lambda: dist.distributed_c10d._abort_process_group())


def test_scaled_sums() -> None:
    def main() -> list[Any]:
        rank = dist.get_rank()
        scaled: Any = torch_dist._make_nccl_premul_sum(2.0 + rank)  # of its own input
        x = ones()
        dist.all_reduce(x, op=scaled)
        by_tensor = ones(2)
        dist.all_reduce(by_tensor, op=torch_dist._make_nccl_premul_sum(ones() / 2))
        part = ones()
        dist.reduce_scatter(part, [ones(), ones()], op=scaled)
        root = ones()
        dist.reduce(root, 0, op=scaled)
        return [x.item(), by_tensor.tolist(), part.item(), root.item()]

    assert run(main) == [[5.0, [1.0, 1.0], 5.0, 5.0], [5.0, [1.0, 1.0], 5.0, 1.0]]


def test_scaled_sums_of_whole_numbers_are_refused_as_by_nccl() -> None:
    scaled: Any = torch_dist._make_nccl_premul_sum(2.0)
    text = refusal(lambda: dist.all_reduce(ones().long(), op=scaled))
    assert "PREMUL_SUM of torch.int64" in text


def test_fsdp_divides_gradients_by_a_factor_of_its_own() -> None:
    def main() -> float:
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(4, 2).cuda(), mesh=init_device_mesh("cuda", (2,)))
        model.set_gradient_divide_factor(4.0)
        model(torch.ones(1, 4, device="cuda")).sum().backward()
        return model.bias.grad.full_tensor()[0].item()

    assert run(main) == [0.5, 0.5]
