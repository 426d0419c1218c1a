"""Sharded states, with a part of each batch on each rank: ZeRO, and torch's FSDP."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.models import layers_of
from distlab.production.optimization import optimizer_of
from distlab.production.states import Own
from distlab.production.strategies.base import DTYPES, Parameters, Strategy
from distlab.production.types import HasState


class TorchFSDP(Strategy):
    """torch's fully_shard: parameters, gradients and optimizer state in shards."""

    has_own_parameters = True

    def distribute(self, model: nn.Module) -> None:
        """Shard each block, then the rest."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        policy = policy_of(self.config)
        for layer in layers_of(model)[1:-1]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.root: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.module = self.called = model
        self._mark_waits()
        self.make_optimizer()

    def _mark_waits(self) -> None:
        """Count what makes a GPU's streams wait for messages; torch has no hooks there."""
        units = [unit for unit in self.root.modules() if isinstance(unit, FSDPModule)]
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
        for group in groups if self.device.type == "cuda" else []:
            for name in ("wait_for_unshard", "post_backward", "finalize_backward"):
                if group:
                    setattr(group, name, self._waiting_in(getattr(group, name)))

    def _waiting_in(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def waiting(*args: Any) -> Any:
            with self.waiting():
                return call(*args)

        return waiting

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the logits, and reshard, so that an evaluation can swap parameters."""
        logits = super().predict(inputs)
        self.root.reshard()
        return logits

    def parts(self) -> Mapping[str, HasState]:
        """Gather the whole model and optimizer, so that any number of ranks can resume."""
        whole: dict[str, HasState] = {
            "model": _Whole(self.module),
            "optimizer": _WholeOptimizer(self),
        }
        return {**super().parts(), **whole}


def dtype_of_whole(config: Config) -> torch.dtype:
    """Return the dtype in which parameters are gathered and used.

    BatchNorm computes in 32 bits, so a ResNet's parameters stay float32 and autocast does the rest.
    """
    stays = config.model.startswith("resnet") and config.is_half
    return torch.float32 if stays else DTYPES[config.precision]


def policy_of(config: Config) -> MixedPrecisionPolicy:
    """Return the dtypes for fully_shard, with which gradients are reduced in 32 bits."""
    dtype = dtype_of_whole(config)
    is_half = dtype.itemsize == 2
    return MixedPrecisionPolicy(dtype, torch.float32) if is_half else MixedPrecisionPolicy()


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class _Whole:
    """A sharded model as one state, gathered only on rank 0, which writes it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.module, options=WHOLE)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_model_state_dict(self.module, dict(state), options=SPREAD)


class _WholeOptimizer:
    """The optimizer of a sharded model as one state."""

    def __init__(self, strategy: Strategy) -> None:
        self.module, self.optimizer = strategy.module, strategy.optimizer

    def state_dict(self) -> dict[str, Any]:
        if not self.optimizer.state:  # torch would take a step to make it, and keep its momentum
            return {}
        return get_optimizer_state_dict(self.module, self.optimizer, options=WHOLE)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            self.optimizer.state.clear()
            return
        set_optimizer_state_dict(self.module, self.optimizer, dict(state), options=SPREAD)


class ShardedOptimizer(Strategy):
    """ZeRO stages 1 and 2: tasks 3.18 and 3.19."""

    def distribute(self, model: nn.Module) -> None:
        """Move the parameters into flat memory; each rank updates its shard."""
        self.module = self.called = model
        self.sharded = sharded_optimizer(self)
        self.optimizer = self.sharded.optimizer

    def zero_grad(self) -> None:
        """Set the gradients to 0 in place."""
        self.sharded.zero_grad()

    def step(self) -> None:
        """Average the gradients, update this rank's shard, and gather the others'."""
        with self.waiting():  # the update is short: a shard's
            self.sharded.step()

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts, with one optimizer per rank.

        Master copies are views of the parameters, so they need no entry.
        """
        return {**super().parts(), "optimizer": Own(self.optimizer)}


def sharded_optimizer(strategy: Strategy) -> Any:
    """Return the optimizer of task 3.18 or 3.19 for this rank's part of the model.

    With ``communication_pattern: ring``, the optimizer of 3.18 uses the ring of 3.1 for gradients.
    """
    config, lesson = strategy.config, strategy.lessons("zero")
    cls = {1: lesson.ShardedOptimizer, 2: lesson.ShardedGradientOptimizer}[config.zero_redundancy]
    kind, options = optimizer_of(config)
    sharded = cls(strategy.module.parameters(), kind, group=strategy.replicas, **options)
    if (config.zero_redundancy, config.communication_pattern) == (1, "ring"):
        ring = strategy.lessons("ring_allreduce").ring_reduce_scatter
        sharded.reduce_gradients = lambda: [
            ring(gradient, strategy.replicas).div_(strategy.num_replicas)
            for gradient in sharded.gradients
        ]
    return sharded


def gradients_into(sharded: Any) -> None:
    """Copy gradients that are stored elsewhere into the flat memory of a sharded optimizer."""
    for part, flat, gradient in zip(sharded.parts, sharded.flats, sharded.gradients, strict=True):
        for parameter, view in zip(part, flat.views(gradient), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)


class FullySharded(Strategy):
    """ZeRO stage 3: task 3.20."""

    has_own_parameters = True

    def distribute(self, model: nn.Module) -> None:
        """Shard the parameters; each unit is gathered only while it computes."""
        if self.config.compile:
            raise ConfigError(
                "zero_redundancy: 3 finds a unit's parameters among what autograd saves, where "
                "compiled code has others: leave compile out, or use strategy: fsdp"
            )
        lesson = self.lessons("zero")
        self.dtype = dtype_of_whole(self.config)
        model = lesson.FullyShardedDataParallel(model, compute_dtype=self.dtype)
        self.module = self.called = model
        self.make_optimizer()

    def forward_backward(self, inputs: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Compute in the dtype of the gathered parameters."""
        return super().forward_backward(self._cast(inputs), targets, num_samples)

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the logits of this rank's inputs."""
        return super().predict(self._cast(inputs))

    def _cast(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts, with one model shard and one optimizer per rank."""
        model = Own(Parameters(self.module))
        return {**super().parts(), "model": model, "optimizer": Own(self.optimizer)}
