"""Tensor parallelism of Phase 2 beside ``torch.distributed.tensor.parallel``."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from distlab import chosen, launch
from distlab import lessons as course
from distlab.bench import rivals
from distlab.bench.rivals import Contestant, Measured
from distlab.grade.submission import Submission
from distlab.util.text import counted

TASKS = ("2.17",)
OURS, TORCHS, PREPARED = "ours", "torch's", "torch's, prepared"
PLANS = """\
Torch's: ColwiseParallel and RowwiseParallel. Prepared: PrepareModuleInput before query, key and
value, so that the gradient of their input is summed once."""
RIVALS = {TORCHS: OURS, PREPARED: OURS}


class Sizes(NamedTuple):
    """Of blocks of a transformer; the width is that of all heads, whose number the ranks divide."""

    rows: int = 4
    positions: int = 64
    heads_per_rank: int = 4
    head_width: int = 16
    blocks: int = 2


SIZES = Sizes()


def print_table(ranks: int, repeats: int, impl: str) -> None:
    """Train a model split by ours and by torch's; print times and collectives of a step.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: a rank failed, or ours computes something else than torch's.
    """
    lessons = chosen.find(impl, TASKS)
    measured, *_ = launch.run(measure_on_rank, ranks, lessons, SIZES, repeats, backend="gloo")
    where = f"{counted(SIZES.blocks, 'block')} on {counted(ranks, 'gloo rank')}"
    columns = rivals.STEP, rivals.COLLECTIVES, rivals.BYTES
    Console().print(rivals.table(f"{where}: median of {repeats} steps", measured, RIVALS, columns))
    print(rivals.WHOSE[impl], PLANS, rivals.PARENTHESES, sep="\n")


def measure_on_rank(lessons: Submission, sizes: Sizes, repeats: int) -> dict[str, Measured]:
    """Measure a model that is split over the ranks by ours, and twice by torch's."""
    lesson: Any = chosen.lesson(lessons, "tensor_parallel")
    torch.manual_seed(0)
    heads = sizes.heads_per_rank * dist.get_world_size()
    width = sizes.head_width * heads
    full = nn.Sequential(*(course.given_2.Block(width, heads) for _ in range(sizes.blocks)))
    x = torch.randn(sizes.rows, sizes.positions, width)
    split = {
        OURS: _split_by_ours(lesson, copy.deepcopy(full)),
        TORCHS: _split_by_torch(copy.deepcopy(full), prepare=False),
        PREPARED: _split_by_torch(copy.deepcopy(full), prepare=True),
    }
    contestants = {name: _contestant(model, x) for name, model in split.items()}
    return rivals.measure(contestants, RIVALS, repeats)


def _split_by_ours(lesson: Any, model: nn.Sequential) -> nn.Sequential:
    for block in model:
        lesson.parallelize_attention(block.attention)
        lesson.parallelize_mlp(block.mlp)
    return model


def _split_by_torch(model: nn.Sequential, *, prepare: bool) -> nn.Sequential:
    """Split; ``prepare``: query, key and value get one input, whose gradient is summed once."""
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


def _contestant(model: nn.Module, x: Tensor) -> Contestant:
    def step() -> float:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return Contestant(model, step)
