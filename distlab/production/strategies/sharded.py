"""Sharded states, with a part of each batch on each rank: ZeRO, and torch's FSDP."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from distlab import lessons
from distlab.production.config import Config
from distlab.production.errors import ConfigError
from distlab.production.models import layers_of
from distlab.production.optimization import TensorMean, optimizer_of
from distlab.production.states import Own, local
from distlab.production.strategies.base import DTYPES, Parameters, Strategy
from distlab.production.types import HasState


class _LocalOptimizer:
    """An optimizer whose state has, in the place of DTensors, this rank's shards of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = tree_map_only(DTensor, local, self.optimizer.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parameters = parameters_of(self.optimizer)
        whole = {
            i: {name: _like(parameters[i], value) for name, value in of_one.items()}
            for i, of_one in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": whole})


def _like(parameter: Tensor, value: Any) -> Any:
    """Return a shard as a DTensor that is laid out like a parameter, and all else as it is."""
    is_shard = isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim()
    if not is_shard:
        return value
    layout: Any = {"shape": parameter.shape, "stride": parameter.stride()}
    whole: Any = parameter
    moved = value.to(parameter.device)
    return DTensor.from_local(moved, whole.device_mesh, whole.placements, **layout)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in the order in which its state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def by_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's parameters by the beginnings of their paths in its state."""
    return {f"['state'][{i}]": p for i, p in enumerate(parameters_of(optimizer))}


class InShards(Strategy):
    """A strategy with which each rank holds a shard of each parameter."""

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts, with this rank's shards of the model and the optimizer's state."""
        named = {f"['{name}']": p for name, p in self.module.named_parameters()}
        return {
            **super().parts(),
            "model": Own(Parameters(self.module), parameters=named),
            "optimizer": Own(_LocalOptimizer(self.optimizer), parameters=by_state(self.optimizer)),
        }

    def of_mean(self, mean: TensorMean) -> HasState:
        """Return the means of this rank's shards."""
        return Own(mean, parameters={f"['means'][{i}]": t for i, t in enumerate(mean.tensors)})


class TorchFSDP(InShards):
    """torch's fully_shard: parameters, gradients and optimizer state in shards."""

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


class ShardedOptimizer(Strategy):
    """ZeRO stages 1 and 2: tasks 3.12 and 3.13."""

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
        self.has_clipped = False
        with self.waiting():  # almost all of it is waiting; updating a shard takes little time
            self.sharded.step()
        if self.config.clip_norm and not self.has_clipped:
            raise ConfigError(
                "clip_norm clips what reduce_gradients returns, and step of task 3.12 or 3.13 has "
                "not called it: call self.reduce_gradients() in step, or leave clip_norm out"
            )

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts, with this rank's shards of the optimizer's state.

        Master copies are views of the parameters, so they need no entry.
        """
        optimizer = Own(self.optimizer, parameters=by_state(self.optimizer))
        return {**super().parts(), "optimizer": optimizer}


def sharded_optimizer(strategy: Strategy) -> Any:
    """Return the optimizer of task 3.12 or 3.13 for this rank's part of the model.

    With ``communication_pattern: ring``, the optimizer of 3.12 uses the ring of 3.1 for gradients.
    """
    config, lesson = strategy.config, strategy.lessons("zero")
    cls = {1: lesson.ShardedOptimizer, 2: lesson.ShardedGradientOptimizer}[config.zero_redundancy]
    kind, options = optimizer_of(config)
    sharded: Any = cls(strategy.module.parameters(), kind, group=strategy.replicas, **options)
    if (config.zero_redundancy, config.communication_pattern) == (1, "ring"):
        ring = strategy.lessons("ring_allreduce").ring_reduce_scatter
        sharded.reduce_gradients = lambda: [
            ring(gradient, strategy.replicas).div_(strategy.num_replicas)
            for gradient in sharded.gradients
        ]
    if config.clip_norm:
        sharded.reduce_gradients = _clipped(sharded.reduce_gradients, strategy)
    return sharded


def _clipped(reduce: Callable[[], list[Tensor]], strategy: Any) -> Callable[[], list[Tensor]]:
    """Return a ``reduce_gradients`` that also clips by the norm of all gradients."""

    def clipped() -> list[Tensor]:
        shards = reduce()
        lessons.given_3.clip_shards(shards, strategy.config.clip_norm, strategy.replicas)
        strategy.has_clipped = True
        return shards

    return clipped


def gradients_into(sharded: Any) -> None:
    """Copy gradients that are stored elsewhere into the flat memory of a sharded optimizer."""
    for part, flat, gradient in zip(sharded.parts, sharded.flats, sharded.gradients, strict=True):
        for parameter, view in zip(part, flat.views(gradient), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)


class FullySharded(InShards):
    """ZeRO stage 3: task 3.14."""

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

    def clip_gradients(self) -> None:
        """Scale this rank's shards by the norm of all gradients."""
        shards = [p.grad for p in self.module.parameters() if p.grad is not None]
        lessons.given_3.clip_shards(shards, self.config.clip_norm, self.replicas)

    def forward_backward(self, inputs: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Compute in the dtype of the gathered parameters."""
        return super().forward_backward(self._cast(inputs), targets, num_samples)

    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the logits of this rank's inputs."""
        return super().predict(self._cast(inputs))

    def _cast(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs
