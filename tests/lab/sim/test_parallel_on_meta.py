"""torch's parallel modules train models on meta, at the same cost as on CPU."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import simulate


def train_in_shards(device: str) -> str:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device(device):
        layers = [fully_shard(nn.Linear(64, 64), mesh=mesh) for _ in range(3)]
        model = fully_shard(nn.Sequential(*layers), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return layers[0].weight.to_local().device.type


def test_fsdp_on_meta_costs_what_it_costs_on_cpu() -> None:
    on_cpu, on_meta = (
        simulate(train_in_shards, 4, device, cluster="dgx-h100") for device in ("cpu", "meta")
    )
    assert (on_cpu.results[0], on_meta.results[0]) == ("cpu", "meta")
    assert on_meta.seconds == on_cpu.seconds > 0
    assert on_meta.trace.peak_by_category == on_cpu.trace.peak_by_category
    assert on_meta.flops == on_cpu.flops
    assert min(on_meta.flops) > 0
    # Outside a world, FSDP is unchanged.
    assert not hasattr(torch, "meta")
    group: Any = torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
    assert group._validate_no_meta_params.__name__ == "_validate_no_meta_params"


def train_copies(device: str) -> None:
    with torch.device(device):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        model(torch.ones(4, 64)).sum().backward()


def test_the_first_step_of_ddp_on_meta_costs_what_it_costs_on_cpu() -> None:
    """Expect less time on meta, where the check that all ranks have the same shapes is skipped."""
    on_cpu, on_meta = (
        simulate(train_copies, 4, device, cluster="dgx-h100") for device in ("cpu", "meta")
    )
    assert on_meta.flops == on_cpu.flops
    assert on_meta.trace.peak_by_category == on_cpu.trace.peak_by_category
    assert on_meta.seconds < on_cpu.seconds
