"""A model that no rank holds whole: pipelines of stages, and split layers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from distlab.production.errors import ConfigError
from distlab.production.models import layer_flops, layers_of, num_heads, split_heads
from distlab.production.states import OwnBuffers, PerRank
from distlab.production.strategies.base import Parameters
from distlab.production.strategies.replicated import CourseDDP
from distlab.production.strategies.sharded import gradients_into, sharded_optimizer
from distlab.production.types import Batch, HasState

DIMS = ("replicas", "stages", "shards")  # shards communicate most, so they are neighbours
MICRO_BATCHES_PER_STAGE = 4  # the bubble, (p-1)/(m+p-1), is then less than 1/5 of the time


class Split(CourseDDP):
    """Replicas of a model, each cut into stages, which are in turn cut into shards.

    On 8 ranks, with pipeline_parallelism 2 and tensor_parallelism 2:
    replica 0    stage 0: ranks 0, 1    stage 1: ranks 2, 3
    replica 1    stage 0: ranks 4, 5    stage 1: ranks 6, 7

    With zero_redundancy: 1, ranks 0 and 4 share the optimizer state, as do 1 and 5, and so on.
    """

    has_own_parameters = True
    sharded: Any = None  # the optimizer, if replicas share its state

    def distribute(self, model: nn.Module) -> None:
        """Keep this rank's shards of the layers of its stage."""
        sizes = self._sizes()
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=DIMS)
        self.replicas, self.stages, self.shards = (mesh.get_group(name) for name in DIMS)
        if sizes[2] > 1:
            self._split_layers(model, sizes[2])
        stage = self._stage(model) if sizes[1] > 1 else model
        self._share(stage)
        if sizes[1] > 1:
            runner = self.lessons("model_parallel").StageRunner
            self.runner = runner(stage, self.stages)

    def _share(self, stage: nn.Module) -> None:
        """Let a stage's replicas average gradients and, if configured, share optimizer state."""
        if not self.config.zero_redundancy:
            super().distribute(stage)
            return
        self.module = self.called = stage
        self.hook = None
        self.sharded = sharded_optimizer(self)
        self.optimizer = self.sharded.optimizer

    def _sizes(self) -> tuple[int, int, int]:
        stages, shards = self.config.pipeline_parallelism, self.config.tensor_parallelism
        num_ranks = dist.get_world_size()
        if num_ranks % (stages * shards):
            raise ConfigError(
                f"pipeline_parallelism {stages} x tensor_parallelism {shards} needs a multiple of "
                f"{stages * shards} ranks, and here are {num_ranks}: set num_gpus to one"
            )
        return num_ranks // (stages * shards), stages, shards

    def _split_layers(self, model: nn.Module, num_shards: int) -> None:
        heads = num_heads(self.config)
        if heads % num_shards:
            raise ConfigError(
                f"{heads} attention heads of {self.config.model} cannot be shared by "
                f"tensor_parallelism {num_shards}: use a divisor of {heads}"
            )
        split_heads(model)
        lesson = self.lessons("tensor_parallel")
        vit: Any = model
        for block in vit.encoder.layers:
            lesson.parallelize_attention(block.self_attention, self.shards)
            lesson.parallelize_mlp(block.mlp, self.shards)

    def _stage(self, model: nn.Module) -> nn.Sequential:
        """Return this rank's stage; all stages need about the same number of FLOPs."""
        layers = layers_of(model)
        costs = layer_flops(layers, self.config.image_size)
        partition = self.lessons("model_parallel").partition_layers
        if len(layers) < self.config.pipeline_parallelism:
            raise ConfigError(
                f"{self.config.model} has {len(layers)} layers, too few for pipeline_parallelism "
                f"{self.config.pipeline_parallelism}"
            )
        mine = partition(costs, self.config.pipeline_parallelism)[dist.get_rank(self.stages)]
        return nn.Sequential(*layers[mine.start : mine.stop])

    @property
    def is_pipeline(self) -> bool:
        """True if there are several stages."""
        return self.config.pipeline_parallelism > 1

    def forward_backward(self, images: Tensor, targets: Tensor, num_samples: int) -> Tensor:
        """Run the micro-batches through the stages, as in task 2.12."""
        if not self.is_pipeline:
            return super().forward_backward(images, targets, num_samples)
        pipeline = self.lessons("pipeline_parallel")
        split = self.lessons("gradient_accumulation").split_micro_batches
        stages = dist.get_world_size(self.stages)
        size = -(-len(images) // (MICRO_BATCHES_PER_STAGE * stages))
        micro_batches = split((images, targets), size)
        schedule = pipeline.one_f_one_b_schedule(stages, len(micro_batches))
        with self.autocast(), self.accumulating(is_last=False):
            mean = pipeline.run_schedule(
                schedule, [self.module], micro_batches, self._loss, self.stages
            )
        weight = len(images) * self.num_replicas / num_samples
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= weight
        return torch.tensor(mean * len(images), device=self.device)

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        """Keep gradients on this rank; a sharded optimizer always does so until the step."""
        with nullcontext() if self.sharded else super().accumulating(is_last=is_last):
            yield

    def zero_grad(self) -> None:
        """Set the gradients to 0 in place."""
        self.sharded.zero_grad() if self.sharded else super().zero_grad()

    def average_gradients(self) -> None:
        """Wait for the last bucket; a sharded optimizer averages in its step."""
        if not self.sharded:
            super().average_gradients()
        elif self.is_pipeline:  # its backward passes create new gradients
            gradients_into(self.sharded)

    def step(self) -> None:
        """Update the parameters of this stage."""
        if not self.sharded:
            super().step()
            return
        with self.waiting():
            self.sharded.step()

    def _loss(self, stage: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, targets = batch[:2]
        return self.loss_sum(stage(inputs), targets), len(targets)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the logits of a replica's images on all its ranks."""
        if not self.is_pipeline:
            return super().predict(images)
        is_first = dist.get_rank(self.stages) == 0
        logits: Tensor | None = self.runner.forward(*((images,) if is_first else ()))
        shape: list[Any] = [list(logits.shape) if logits is not None else None]
        last = dist.get_world_size(self.stages) - 1
        dist.broadcast_object_list(shape, group=self.stages, group_src=last)
        if logits is None:
            logits = torch.empty(shape[0], device=self.device)
        logits = logits.float().contiguous()
        dist.broadcast(logits, group=self.stages, group_src=last)
        return logits

    @property
    def counts(self) -> bool:
        """True on one rank of each replica."""
        return dist.get_rank(self.stages) == dist.get_rank(self.shards) == 0

    def parts(self) -> Mapping[str, HasState]:
        """Return the parts of a checkpoint, all of which differ between ranks."""
        return {
            "model": PerRank(Parameters(self.module)),
            "buffers": PerRank(OwnBuffers(self.module)),
            "optimizer": PerRank(self.optimizer),
        }
