"""A model that no rank holds whole: pipelines of stages, and split layers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab import lessons
from distlab.models.gpt import Attention, FeedForward
from distlab.production.errors import ConfigError
from distlab.production.models import (
    SplitMLP,
    layer_flops,
    layers_of,
    num_heads,
    split_heads,
    tied_weight,
)
from distlab.production.optimization import TensorMean
from distlab.production.states import Buffers, Own
from distlab.production.strategies.base import Parameters
from distlab.production.strategies.replicated import (
    CourseDDP,
    all_reduce_of,
    average_after_backward,
)
from distlab.production.strategies.sharded import by_state, gradients_into, sharded_optimizer
from distlab.production.types import Batch, HasState

MICRO_BATCHES_PER_STAGE = 4  # the bubble, (p-1)/(m+p-1), is then less than 1/5 of the time


class Split(CourseDDP):
    """Replicas of a model, each cut into stages, which are in turn cut into shards.

    With zero_redundancy: 1, the replicas of a stage share its optimizer state.
    """

    sharded: Any = None  # the optimizer, if replicas share its state

    def distribute(self, model: nn.Module) -> None:
        """Keep this rank's shards of the layers of its stage."""
        if self.config.parallelism.tp > 1:
            self._split_layers(model)
        stage = self._stage(model) if self.is_pipeline else model
        self._share(stage)
        self.tied = tied_weight(stage) if self.mesh.ends else None
        if self.is_pipeline:
            runner = self.lessons("model_parallel").StageRunner
            self.runner = runner(stage, self.mesh.stages)

    def _share(self, stage: nn.Module) -> None:
        """Let a stage's replicas average gradients and, if configured, share optimizer state."""
        if self.is_in_buckets:
            super().distribute(stage)
            return
        self.module = self.called = stage
        self.hook = None
        if self.config.zero_redundancy:
            self.sharded = sharded_optimizer(self)
            self.optimizer = self.sharded.optimizer
        else:
            self.make_optimizer()
            self.all_reduce = all_reduce_of(self)

    @property
    def is_in_buckets(self) -> bool:
        """True if gradients travel during the backward pass."""
        return self.config.gradients == "buckets" and not self.config.zero_redundancy

    def _split_layers(self, model: nn.Module) -> None:
        """Keep this rank's shard of each block; all other layers stay whole on every rank."""
        heads, num_shards = num_heads(self.config), self.config.parallelism.tp
        if heads % num_shards:
            raise ConfigError(
                f"{heads} attention heads of {self.config.model} cannot be shared equally by "
                f"tp={num_shards}: use a divisor of {heads}"
            )
        split_heads(model)
        lesson = self.lessons("tensor_parallel")
        for module in list(model.modules()):
            if isinstance(module, Attention):
                lesson.parallelize_attention(module, self.mesh.shards)
            if isinstance(module, FeedForward | SplitMLP):
                lesson.parallelize_mlp(module, self.mesh.shards)

    def _stage(self, model: nn.Module) -> nn.Sequential:
        """Return this rank's stage; all stages need about the same number of FLOPs."""
        layers, num_stages = layers_of(model), self.config.parallelism.pp
        costs = layer_flops(layers, self.config)
        partition = self.lessons("model_parallel").partition_layers
        if len(layers) < num_stages:
            raise ConfigError(
                f"{self.config.model} has {len(layers)} layers, too few for pp={num_stages}"
            )
        mine = partition(costs, num_stages)[dist.get_rank(self.mesh.stages)]
        return nn.Sequential(*layers[mine.start : mine.stop])

    @property
    def is_pipeline(self) -> bool:
        """True if there are several stages."""
        return self.config.parallelism.pp > 1

    def forward_backward(self, inputs: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Run the micro-batches through the stages, as in task 2.10."""
        if not self.is_pipeline:
            return super().forward_backward(inputs, targets, num_samples)
        pipeline = self.lessons("pipeline_parallel")
        split = self.lessons("gradient_accumulation").split_micro_batches
        stages = self.config.parallelism.pp
        size = -(-len(inputs) // (MICRO_BATCHES_PER_STAGE * stages))
        micro_batches = split((inputs, targets), size)
        schedule = pipeline.one_f_one_b_schedule(stages, len(micro_batches))
        with self.autocast(), self.accumulating(is_last=False):
            mean = pipeline.run_schedule(
                *(schedule, [self.module], micro_batches),
                lessons.given_2.LossSum(self._loss, lambda batch: len(batch[1])),
                self.mesh.stages,
            )
        weight = len(inputs) * self.num_replicas / num_samples
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= weight
        return torch.tensor(mean * len(inputs), device=self.device, dtype=torch.float64)

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Keep gradients on this rank; without buckets, they stay there in any case."""
        with super().accumulating(is_last=is_last) if self.is_in_buckets else nullcontext():
            yield

    def zero_grad(self) -> None:
        """Set the gradients to 0 in place."""
        self.sharded.zero_grad() if self.sharded else super().zero_grad()

    def average_gradients(self) -> None:
        """Average over the replicas; a sharded optimizer does that in its step."""
        if not self.sharded:
            if self.is_in_buckets:
                super().average_gradients()
            else:
                average_after_backward(self, self.all_reduce)
            self._sum_tied_gradient()
        elif self.is_pipeline:  # its backward passes create new gradients
            self._sum_tied_gradient()
            gradients_into(self.sharded)

    def _sum_tied_gradient(self) -> None:
        """Sum the gradients of the embedding and the head, which are one parameter in the model.

        The last call on them must give both ends the same bits, or the two copies would drift
        apart. The replicas' averages do not: they are in different buckets. So the ends sum what
        the replicas have averaged or, where the optimizer averages, exchange the weight itself.
        """
        if self.tied is not None and self.tied.grad is not None:
            dist.all_reduce(self.tied.grad, group=self.mesh.ends)

    def step(self) -> None:
        """Update the parameters of this stage."""
        if not self.sharded:
            super().step()
            return
        with self.waiting():
            self.sharded.step()
            if self.tied is not None:
                dist.broadcast(self.tied.detach(), group=self.mesh.ends, group_src=0)

    def _loss(self, stage: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch[:2]
        return self.loss_sum(stage(inputs), targets)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor | None:
        """Return the logits of a replica's inputs on the ranks of its last stage, or else None."""
        if not self.is_pipeline:
            return super().predict(inputs)
        is_first = dist.get_rank(self.mesh.stages) == 0
        logits: Tensor | None = self.runner.forward(*((inputs,) if is_first else ()))
        return logits

    @property
    def counts(self) -> bool:
        """True on one rank of the last stage of each replica."""
        is_last = dist.get_rank(self.mesh.stages) == self.config.parallelism.pp - 1
        return is_last and dist.get_rank(self.mesh.shards) == 0

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts of a checkpoint, which differ between the places of the model."""
        sizes = self.config.parallelism
        shared = by_state(self.optimizer) if self.sharded else None
        return {
            "model": self._own(Parameters(self.module)),
            "buffers": Buffers(self.module, sizes.pp * sizes.tp),
            "optimizer": self._own(self.optimizer, shared),
        }

    def of_mean(self, mean: TensorMean) -> HasState:
        """Return the means of this place's parameters."""
        return self._own(mean)

    def _own(self, part: HasState, parameters: Mapping[str, Tensor] | None = None) -> Own:
        sizes, mesh = self.config.parallelism, self.mesh
        stage, shard = dist.get_rank(mesh.stages), dist.get_rank(mesh.shards)
        place = f"stage {stage} of {sizes.pp}, shard {shard} of {sizes.tp}:"
        return Own(part, place, replicas=mesh.replicas, parameters=parameters)
