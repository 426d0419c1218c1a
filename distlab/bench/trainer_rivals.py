"""Plain loops with what torch has, beside which the production trainer is measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distlab.bench.trainer_contestants import Contestant, Losses, Setting, batches_of
from distlab.production.models import layer_flops, layers_of, split_heads
from distlab.production.optimization import optimizer_of
from distlab.production.strategies.replicated import OWN_BUFFERS
from distlab.production.strategies.sharded import dtype_of_whole
from distlab.production.strategies.split import MICRO_BATCHES_PER_STAGE
from distlab.production.types import Group

with warnings.catch_warnings():  # beside it lies what torch has deprecated itself
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

Step = Callable[[Tensor, Tensor], Losses]


def _loop(setting: Setting, step: Step, group: Group = None) -> Contestant:
    """Return what takes a step on each of the batches which the trainer has in that step, too."""
    batches = batches_of(setting, group)

    def run(num_steps: int) -> Losses:
        losses = Losses()
        for images, labels in islice(batches, num_steps):
            losses = losses.and_of(*step(images, labels))
        return losses

    return run


def _plain(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group = None
) -> Contestant:
    """Return the loop that torchvision's references have, without their meters of accuracy."""

    def step(images: Tensor, labels: Tensor) -> Losses:
        with setting.autocast():
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return Losses(loss.item() * len(labels), len(labels))

    return _loop(setting, step, group)


def data_parallel(setting: Setting) -> Contestant:
    """DistributedDataParallel; as in the trainer, no rank waits for the buffers of another."""
    model = DistributedDataParallel(setting.model(), **OWN_BUFFERS)
    return _plain(setting, model, setting.optimizer(model.parameters()))


def zero_redundancy(setting: Setting) -> Contestant:
    """The same with ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(setting.model(), **OWN_BUFFERS)
    kind, options = optimizer_of(setting.config)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), kind, parameters_as_bucket_view=True, **options
    )
    return _plain(setting, model, optimizer)


def sharded(setting: Setting, *, is_freed: bool) -> Contestant:
    """fully_shard; ``is_freed``: parameters are gathered again in the backward pass."""
    model, mesh = setting.model(), _mesh(setting)
    dtype = dtype_of_whole(setting.config)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32
    )
    for module in (*layers_of(model)[1:-1], model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=is_freed)
    return _plain(setting, model, setting.optimizer(model.parameters()))


def _mesh(setting: Setting) -> Any:
    return init_device_mesh(setting.device.type, (dist.get_world_size(),))


def pipeline(setting: Setting) -> Contestant:
    """Schedule1F1B, with the same stages and micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, num_stages = dist.get_rank(), dist.get_world_size()
    stage, is_last = _stage(setting, rank, num_stages), rank == num_stages - 1
    optimizer = setting.optimizer(stage.parameters())
    staged = PipelineStage(stage, rank, num_stages, setting.device)
    count = MICRO_BATCHES_PER_STAGE * num_stages
    schedule = Schedule1F1B(staged, count, loss_fn=cross_entropy)

    def step(images: Tensor, labels: Tensor) -> Losses:
        inputs, losses = (images,) if rank == 0 else (), list[Tensor]()
        optimizer.zero_grad(set_to_none=True)
        with setting.autocast():
            target = labels if is_last else None
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        mean = torch.stack(losses).mean().item() if is_last else 0.0
        return Losses(mean * len(labels), len(labels) if is_last else 0)

    return _loop(setting, step, _alone())


def _alone() -> Group:
    """Return a group of this rank: a replica of several ranks reads each batch on all of them."""
    own: Group
    own, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    return own


def _stage(setting: Setting, rank: int, num_stages: int) -> nn.Sequential:
    """Cut where the trainer cuts."""
    layers = layers_of(setting.model())
    partition = setting.lessons("model_parallel").partition_layers
    mine = partition(layer_flops(layers, setting.config.image_size), num_stages)[rank]
    return nn.Sequential(*layers[mine.start : mine.stop], _Contiguous())


class _Contiguous(nn.Module):
    """Lays out what a stage sends: torch's receives as it was laid out, and gloo refuses that."""

    def forward(self, x: Tensor) -> Tensor:  # any shape -> the same
        return x.contiguous()


def tensor_parallel(setting: Setting) -> Contestant:
    """ColwiseParallel and RowwiseParallel; gradients of an attention's input are summed once."""
    vit: Any = setting.model()
    split_heads(vit)
    attention, same = "self_attention", (Replicate(), None, None)
    columns = (*(f"{attention}.{name}" for name in ("query", "key", "value")), "mlp.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in (f"{attention}.out", "mlp.down")}
    plan[attention] = PrepareModuleInput(input_layouts=same, desired_input_layouts=same)
    mesh = _mesh(setting)
    for block in vit.encoder.layers:
        parallelize_module(block, mesh, plan)
    return _plain(setting, vit, setting.optimizer(vit.parameters()), _alone())
