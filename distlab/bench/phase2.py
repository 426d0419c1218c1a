"""Compare Phase 2's pipelines, checkpointing and tensor parallelism with torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import checkpoint

from distlab import lessons
from distlab.bench import contest
from distlab.bench.contest import Contest, Contestant, Lesson, Measured
from distlab.production.types import Batch
from distlab.util.text import counted

MICRO_BATCHES_PER_STAGE = 2


def _blocks(count: int, width: int, heads: int) -> nn.Sequential:
    block = lessons.given_2.Block
    return nn.Sequential(*(block(width, heads) for _ in range(count)))


# Pipelines


class PipelineSizes(NamedTuple):
    """Sizes of a micro-batch, (rows, positions, width), and of a stage of transformer blocks."""

    rows: int = 4
    positions: int = 64
    width: int = 128
    heads: int = 4
    blocks: int = 1
    classes: int = 10


PIPELINES = {"torch's ScheduleGPipe": "GPipe", "torch's Schedule1F1B": "1F1B"}


def measure_pipelines(lesson: Lesson, sizes: PipelineSizes, repeats: int) -> dict[str, Measured]:
    """Measure GPipe and 1F1B, ours and torch's, with this rank as one stage."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    pipeline, num_stages = lesson("pipeline_parallel"), dist.get_world_size()
    num_micro_batches = MICRO_BATCHES_PER_STAGE * num_stages
    stage, batch = _stage(sizes), _batch(sizes, num_micro_batches)
    contestants = {}
    for (rival, ours), write, make in zip(
        PIPELINES.items(),
        (pipeline.gpipe_schedule, pipeline.one_f_one_b_schedule),
        (ScheduleGPipe, Schedule1F1B),
        strict=True,
    ):
        run = partial(pipeline.run_schedule, write(num_stages, num_micro_batches))
        contestants[ours] = _our_pipeline(run, copy.deepcopy(stage), batch, num_micro_batches)
        contestants[rival] = _torchs_pipeline(make, copy.deepcopy(stage), batch, num_micro_batches)
    return contest.measure(contestants, PIPELINES, repeats)


def _stage(sizes: PipelineSizes) -> nn.Sequential:
    """Return this rank's part of the model; the last stage returns the logits."""
    torch.manual_seed(dist.get_rank())
    stage = _blocks(sizes.blocks, sizes.width, sizes.heads)
    if dist.get_rank() == dist.get_world_size() - 1:
        stage.append(nn.Linear(sizes.width, sizes.classes))
    return stage


def _batch(sizes: PipelineSizes, num_micro_batches: int) -> Batch:
    """Return inputs and targets, the same on all ranks."""
    torch.manual_seed(0)
    positions = sizes.rows * num_micro_batches, sizes.positions
    return torch.randn(*positions, sizes.width), torch.randint(sizes.classes, positions)


def _our_pipeline(
    run: Callable[..., float], stage: nn.Module, batch: Batch, num_micro_batches: int
) -> Contestant:
    def step() -> float:
        parts = zip(*(x.chunk(num_micro_batches) for x in batch), strict=True)
        return run([stage], list(parts), lessons.given_2.cross_entropy_sum)

    return Contestant(stage, step)


def _torchs_pipeline(
    make: Callable[..., Any], stage: nn.Module, batch: Batch, num_micro_batches: int
) -> Contestant:
    from torch.distributed.pipelining import PipelineStage

    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_last = rank == num_stages - 1
    staged = PipelineStage(stage, rank, num_stages, torch.device("cpu"))
    schedule = make(staged, num_micro_batches, loss_fn=_mean_loss)
    inputs, target = batch[:1] if rank == 0 else (), batch[1] if is_last else None

    def step() -> float | None:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item() if is_last else None

    return Contestant(stage, step)


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


PIPELINE = Contest(
    "pipeline",
    ("2.9", "2.10"),
    PIPELINES,
    PipelineSizes(),
    lambda sizes, ranks, repeats: (
        f"{ranks} stages, {MICRO_BATCHES_PER_STAGE * ranks} micro-batches: "
        f"median of {repeats} steps"
    ),
    measure_pipelines,
    ((contest.STEP, contest.PEAK),),
    (contest.PARENTHESES, contest.PEAK_MEMORY),
)


# Activation checkpointing


class MemorySizes(NamedTuple):
    """Shape of an activation, (rows, positions, width), and number of transformer blocks."""

    rows: int = 4
    positions: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 36


KEPT, OURS, TORCHS = "everything kept", "checkpoint_sequential", "torch's checkpoint_sequential"
CHECKPOINTS = {KEPT: OURS, TORCHS: OURS}


def measure_checkpoints(lesson: Lesson, sizes: MemorySizes, repeats: int) -> dict[str, Measured]:
    """Measure steps without checkpointing, with ours and with torch's."""
    ours = lesson("activation_checkpointing").checkpoint_sequential
    torchs: Any = checkpoint.checkpoint_sequential
    torch.manual_seed(0)
    layers = _blocks(sizes.layers, sizes.width, sizes.heads)
    x, segments = torch.randn(*sizes[:3]), isqrt(sizes.layers)
    forwards: dict[str, Callable[[Any, Tensor], Tensor]] = {
        KEPT: lambda model, x: model(x),
        OURS: lambda model, x: ours([*model], segments, x),
        TORCHS: lambda model, x: torchs(model, segments, x, use_reentrant=False),
    }
    contestants = {
        name: contest.plain(copy.deepcopy(layers), x, forward=forward)
        for name, forward in forwards.items()
    }
    return contest.measure(contestants, CHECKPOINTS, repeats)


MEMORY = Contest(
    "memory",
    ("2.5", "2.6"),
    CHECKPOINTS,
    MemorySizes(),
    lambda sizes, ranks, repeats: (
        f"{sizes.layers} layers, {isqrt(sizes.layers)} segments: median of {repeats} steps"
    ),
    measure_checkpoints,
    ((contest.STEP, contest.PEAK),),
    (contest.PARENTHESES, contest.PEAK_MEMORY),
)


# Tensor parallelism


class TensorSizes(NamedTuple):
    """Sizes of transformer blocks, whose heads are a multiple of the number of ranks."""

    rows: int = 4
    positions: int = 64
    heads_per_rank: int = 4
    head_width: int = 16
    blocks: int = 2


SPLIT, TORCHS_SPLIT, PREPARED = "ours", "torch's", "torch's, prepared"
SPLITS = {TORCHS_SPLIT: SPLIT, PREPARED: SPLIT}
PLANS = """\
Torch's: ColwiseParallel and RowwiseParallel. Prepared: PrepareModuleInput before query, key and
value, so that the gradient of their input is summed once."""


def measure_splits(lesson: Lesson, sizes: TensorSizes, repeats: int) -> dict[str, Measured]:
    """Measure models split over the ranks: one by our functions, and two by torch's."""
    torch.manual_seed(0)
    heads = sizes.heads_per_rank * dist.get_world_size()
    width = sizes.head_width * heads
    whole = _blocks(sizes.blocks, width, heads)
    x = torch.randn(sizes.rows, sizes.positions, width)
    split = {
        SPLIT: _split_by_ours(lesson("tensor_parallel"), copy.deepcopy(whole)),
        TORCHS_SPLIT: _split_by_torch(copy.deepcopy(whole), prepare=False),
        PREPARED: _split_by_torch(copy.deepcopy(whole), prepare=True),
    }
    contestants = {name: contest.plain(model, x) for name, model in split.items()}
    return contest.measure(contestants, SPLITS, repeats)


def _split_by_ours(lesson: Any, model: nn.Sequential) -> nn.Sequential:
    for block in model:
        lesson.parallelize_attention(block.attention)
        lesson.parallelize_mlp(block.mlp)
    return model


def _split_by_torch(model: nn.Sequential, *, prepare: bool) -> nn.Sequential:
    """Split a model with torch; with ``prepare``, attention sums its input's gradient only once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
    if prepare:
        same = (Replicate(),)
        plan["attention"] = PrepareModuleInput(input_layouts=same, desired_input_layouts=same)
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


TENSOR_PARALLEL = Contest(
    "tensor_parallel",
    ("2.15",),
    SPLITS,
    TensorSizes(),
    lambda sizes, ranks, repeats: (
        f"{counted(sizes.blocks, 'block')} on {counted(ranks, 'gloo rank')}: "
        f"median of {repeats} steps"
    ),
    measure_splits,
    ((contest.STEP, contest.COLLECTIVES, contest.BYTES),),
    (PLANS, contest.PARENTHESES),
)
