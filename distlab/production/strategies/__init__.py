"""Strategies that spread a model over ranks: torch's own, and the course's.

configuration                                      strategy
strategy: ddp                                      TorchDDP
strategy: fsdp                                     TorchFSDP
strategy: course                                   CourseDDP, any communication_pattern but these
  gradients: per_parameter, flat                   AfterBackward
  communication_pattern: parameter_server          ParameterServer
  zero_redundancy: 1, 2                            ShardedOptimizer
  zero_redundancy: 3                               FullySharded
  parallelism: pp, tp                              Split
"""

from torch import nn

from distlab.production.config import Config
from distlab.production.lessons import Lessons
from distlab.production.models import compile_blocks
from distlab.production.sharding import choose_stage
from distlab.production.strategies.base import LossSum, Strategy
from distlab.production.strategies.mesh import mesh_of
from distlab.production.strategies.replicated import AfterBackward, CourseDDP, TorchDDP
from distlab.production.strategies.server import ParameterServer
from distlab.production.strategies.sharded import FullySharded, ShardedOptimizer, TorchFSDP
from distlab.production.strategies.split import Split

__all__ = ["LossSum", "Strategy", "parallelise"]


def parallelise(model: nn.Module, config: Config, loss_sum: LossSum, lessons: Lessons) -> Strategy:
    """Spread a model, identical on all ranks, as configured; called on all ranks.

    Raises:
        ConfigError: The number of ranks or the model's layers cannot be split that way, or such a
            model cannot be compiled.
    """
    device = next(model.parameters()).device
    config, mesh = choose_stage(config, model), mesh_of(config, device)
    if config.compile:
        compile_blocks(model)
    return _kind(config)(model, config, loss_sum, lessons, mesh)


def _kind(config: Config) -> type[Strategy]:
    if config.strategy != "course":
        return {"ddp": TorchDDP, "fsdp": TorchFSDP}[config.strategy]
    if config.has_servers:
        return ParameterServer
    if config.splits_model:
        return Split
    if config.gradients != "buckets":
        return AfterBackward
    stages = {0: CourseDDP, 1: ShardedOptimizer, 2: ShardedOptimizer, 3: FullySharded}
    return stages[config.zero_redundancy]
