"""Contestants: the production trainer, a few steps at a time, and plain torch loops."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from distlab import lessons
from distlab.production.batches import on_device
from distlab.production.config import Config
from distlab.production.datasets import open_data
from distlab.production.jpegs import decoded
from distlab.production.lessons import Lessons
from distlab.production.loading import Keys, loader_of
from distlab.production.models import build_model, layer_flops, layers_of, split_heads
from distlab.production.optimization import optimizer_of
from distlab.production.strategies.base import DTYPES
from distlab.production.strategies.replicated import DDP_OPTIONS
from distlab.production.strategies.sharded import policy_of
from distlab.production.strategies.split import MICRO_BATCHES_PER_STAGE
from distlab.production.types import Group

with warnings.catch_warnings():  # importing the module triggers deprecation warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

Batch = tuple[Tensor, Tensor]  # inputs and targets of b samples, on the device
Step = Callable[[Tensor, Tensor], "Losses"]


class Losses(NamedTuple):
    """Sum of the losses of some samples on this rank, and the number of samples."""

    total: Tensor | float = 0.0
    num_samples: int = 0

    def and_of(self, total: Tensor | float, num_samples: int) -> Losses:
        """Return these losses plus those of more samples."""
        return Losses(self.total + total, self.num_samples + num_samples)


class Setting(NamedTuple):
    """The configuration, lessons and device that all contestants share."""

    config: Config  # includes the strategy of the trainer
    lessons: Lessons
    device: torch.device

    def model(self) -> nn.Module:
        """Build the model, identical on all ranks and for all contestants."""
        return build_model(self.config, open_data(self.config).num_classes, self.device)

    def optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the optimizer that the configuration names."""
        kind, options = optimizer_of(self.config)
        return kind(parameters, **options)

    def autocast(self) -> Any:
        """Return a context that computes in 16 bits if the configuration asks for it."""
        is_full = self.config.precision == "fp32"
        dtype = DTYPES[self.config.precision]
        return nullcontext() if is_full else torch.autocast(self.device.type, dtype)


Train = Callable[[int], Losses]  # trains for a number of steps
Rival = tuple[str, Callable[[Setting], Train]]  # (name, function that builds its loop)

# Ours


@contextmanager
def trainer(setting: Setting) -> Iterator[Train]:
    """Open a training run with telemetry and signal handlers, and discard its messages."""
    with redirect_stderr(io.StringIO()), ExitStack() as stack:
        training: Any = lessons.imagenet_trainer.Training(*setting)
        few = training.batches = _Few(training.batches, setting)
        for part in (training.telemetry, training.stop):
            stack.enter_context(part)
        plain_step, losses = training.train_step, [Losses()]

        def counted_step(images: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = plain_step(images, targets)
            losses[0] = losses[0].and_of(loss, len(targets))
            return loss

        def run(num_steps: int) -> Losses:
            losses[0], end = Losses(), training.progress.step + num_steps
            while training.progress.step < end:
                few.num_steps = end - training.progress.step
                training.train_epoch()  # trains on the next `few.num_steps` batches
            return losses[0]

        training.train_step = counted_step
        yield run


class _Few:
    """A limited number of the trainer's batches; on a GPU, one batch in its memory, repeated."""

    def __init__(self, batches: Any, setting: Setting) -> None:
        self.batches, self.setting, self.num_steps = batches, setting, 0
        self.bad_images = 0

    def of_epoch(self, strategy: Any) -> Iterator[Batch]:
        """Yield the next ``num_steps`` batches of the epoch, or as many as are left."""
        left = self.batches.of_epoch(strategy)
        if self.setting.device.type == "cuda":
            left = [fixed_batch(self.setting, strategy.replicas)] * len(self.batches.sampler)
        return islice(left, self.num_steps)


# Batches


def batches_of(setting: Setting, group: Group) -> Iterator[Batch]:
    """Yield the trainer's batches endlessly."""
    config, lesson, device = setting
    if device.type == "cuda":
        fixed = fixed_batch(setting, group)
        while True:
            yield fixed
    data = open_data(config)
    sampler = lesson("training_state").ResumableSampler(
        len(data.train), config.batch_size, config.seed, group
    )
    loader = loader_of(data.train, Keys(sampler), config, device)
    while True:
        for inputs, targets in decoded(loader, device):
            yield on_device(inputs, config, device), targets
        sampler.epoch += 1


def fixed_batch(setting: Setting, group: Group) -> Batch:
    """Return a random batch that is already on the device, so that a GPU never waits for it."""
    config, _, device = setting
    number = config.batch_size // dist.get_world_size(group)
    highest = open_data(config).num_classes
    options: Any = {"device": device}
    options["generator"] = torch.Generator(device).manual_seed(dist.get_rank(group))
    if config.is_language:
        tokens = torch.randint(highest, (number, config.sequence_length + 1), **options)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(number, 3, config.image_size, config.image_size, **options)
    labels = torch.randint(highest, (number,), **options)
    return on_device(images, config, device), labels


# Torch's loops


def _loop(setting: Setting, step: Step, group: Group = None) -> Train:
    """Return a loop that takes steps on the same batches as the trainer."""
    batches = batches_of(setting, group)

    def run(num_steps: int) -> Losses:
        losses = Losses()
        for inputs, targets in islice(batches, num_steps):
            losses = losses.and_of(*step(inputs, targets))
        return losses

    return run


def _plain(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group = None
) -> Train:
    """Return the loop of torchvision's reference scripts, without accuracy meters."""

    def step(inputs: Tensor, targets: Tensor) -> Losses:
        with setting.autocast():
            loss = mean_loss(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return Losses(loss.item() * len(targets), len(targets))

    return _loop(setting, step, group)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all images, with logits (B, C), or over all tokens, with (B, T, V)."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def data_parallel(setting: Setting) -> Train:
    """Return a loop with DistributedDataParallel; each rank keeps its own buffers, as in ours."""
    model = DistributedDataParallel(setting.model(), **DDP_OPTIONS)
    return _plain(setting, model, setting.optimizer(model.parameters()))


def zero_redundancy(setting: Setting) -> Train:
    """Return a loop with DistributedDataParallel and ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(setting.model(), **DDP_OPTIONS)
    kind, options = optimizer_of(setting.config)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), kind, parameters_as_bucket_view=True, **options
    )
    return _plain(setting, model, optimizer)


def sharded(setting: Setting, *, is_freed: bool) -> Train:
    """Return a loop with fully_shard; if ``is_freed``, forward passes free parameters after use."""
    model, mesh = setting.model(), _mesh(setting)
    policy = policy_of(setting.config)
    for module in (*layers_of(model)[1:-1], model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=is_freed)
    return _plain(setting, model, setting.optimizer(model.parameters()))


def _mesh(setting: Setting) -> Any:
    return init_device_mesh(setting.device.type, (dist.get_world_size(),))


def pipeline(setting: Setting) -> Train:
    """Return a loop with Schedule1F1B and the trainer's stages and micro-batches."""
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
    """Return a group with only this rank, because all ranks of a replica read the same batch."""
    group: Group
    group, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    return group


def _stage(setting: Setting, rank: int, num_stages: int) -> nn.Sequential:
    """Return this rank's stage of the model, partitioned as in the trainer."""
    layers = layers_of(setting.model())
    partition = setting.lessons("model_parallel").partition_layers
    mine = partition(layer_flops(layers, setting.config), num_stages)[rank]
    return nn.Sequential(*layers[mine.start : mine.stop], _Contiguous())


class _Contiguous(nn.Module):
    """Makes the output of a stage contiguous, because gloo refuses to receive other layouts."""

    def forward(self, x: Tensor) -> Tensor:  # any shape -> the same shape
        return x.contiguous()


def tensor_parallel(setting: Setting) -> Train:
    """Return a tensor-parallel loop that sums the gradient of each attention's input only once."""
    model: Any = setting.model()
    split_heads(model)
    is_gpt = setting.config.is_language
    attention, mlp = ("attention", "feed_forward") if is_gpt else ("self_attention", "mlp")
    same = (Replicate(),) if is_gpt else (Replicate(), None, None)  # a ViT passes x three times
    columns = (*(f"{attention}.{name}" for name in ("query", "key", "value")), f"{mlp}.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in (f"{attention}.out", f"{mlp}.down")}
    plan[attention] = PrepareModuleInput(input_layouts=same, desired_input_layouts=same)
    mesh = _mesh(setting)
    for block in model.blocks if is_gpt else model.encoder.layers:
        parallelize_module(block, mesh, plan)
    return _plain(setting, model, setting.optimizer(model.parameters()), _alone())
