"""Six ways to shard the training of one model: ours, and what torch has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distlab.bench.rivals import Contestant

with warnings.catch_warnings():  # beside it lies what torch has deprecated itself
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

STATE, GRADIENTS, PARAMETERS = "stage 1", "stage 2", "stage 3"
REDUNDANCY, KEPT, FREED = "ZeroRedundancyOptimizer", "FSDP2, kept whole", "FSDP2"
RIVALS = {REDUNDANCY: STATE, KEPT: GRADIENTS, FREED: PARAMETERS}
ADAM: dict[str, Any] = {"lr": 1e-3, "fused": True}


class Sizes(NamedTuple):
    """Of a deep network: layers of a linear one and a normalisation, in buckets of so many MiB."""

    rows: int = 64
    width: int = 512
    layers: int = 16
    bucket_mib: float = 2.0

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * 2**20)


SIZES = Sizes()


class Trained(NamedTuple):
    """A contestant whose steps also update, and its parameters, whole, which all ranks ask for."""

    contestant: Contestant
    whole: Callable[[], Mapping[str, Tensor]]


def model_of(sizes: Sizes) -> nn.Sequential:
    """Return the same model on all ranks."""
    torch.manual_seed(0)
    width = sizes.width
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(sizes.layers)
    ]
    return nn.Sequential(*layers)


def _stage_1(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    model = model_of(sizes)
    optimizer = lesson.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **ADAM)
    return Trained(_contestant(model, optimizer, x), partial(_copies, model))


def _stage_2(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    model, limit = model_of(sizes), {"bucket_bytes": sizes.bucket_bytes}
    cls = lesson.ShardedGradientOptimizer
    optimizer = cls(model.parameters(), torch.optim.AdamW, **limit, **ADAM)
    return Trained(_contestant(model, optimizer, x), partial(_copies, model))


def _stage_3(lesson: Any, sizes: Sizes, x: Tensor) -> Trained:
    model = lesson.FullyShardedDataParallel(model_of(sizes), compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return Trained(_contestant(model, optimizer, x), model.full_state_dict)


def _redundancy(_: Any, sizes: Sizes, x: Tensor) -> Trained:
    plain = model_of(sizes)
    model = nn.parallel.DistributedDataParallel(
        plain, bucket_cap_mb=sizes.bucket_mib, gradient_as_bucket_view=True
    )
    optimizer = ZeroRedundancyOptimizer(
        plain.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAM
    )
    return Trained(_contestant(model, optimizer, x), partial(_copies, plain))


def _fsdp2(is_freed: bool, _: Any, sizes: Sizes, x: Tensor) -> Trained:
    model, mesh = model_of(sizes), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=is_freed)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return Trained(_contestant(model, optimizer, x), partial(_gathered, model))


CONTESTANTS: dict[str, Callable[[Any, Sizes, Tensor], Trained]] = {
    STATE: _stage_1,
    REDUNDANCY: _redundancy,
    GRADIENTS: _stage_2,
    KEPT: partial(_fsdp2, False),
    PARAMETERS: _stage_3,
    FREED: partial(_fsdp2, True),
}


def _contestant(model: nn.Module, optimizer: Any, x: Tensor) -> Contestant:
    def step() -> float:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return Contestant(model, step)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: param.full_tensor() for name, param in named if isinstance(param, DTensor)}
