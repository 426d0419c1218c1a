"""Activation checkpointing of Phase 2 beside ``torch.utils.checkpoint``, and beside none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils import checkpoint

from distlab import chosen, launch
from distlab import lessons as course
from distlab.bench import rivals
from distlab.bench.rivals import Contestant, Measured
from distlab.grade.submission import Submission

TASKS = ("2.6", "2.7")
KEPT, OURS, TORCHS = "everything kept", "checkpoint_sequential", "torch's checkpoint_sequential"
RIVALS = {KEPT: OURS, TORCHS: OURS}


class Sizes(NamedTuple):
    """An activation is (rows, positions, width); a layer is a block of a transformer."""

    rows: int = 4
    positions: int = 64
    width: int = 64
    heads: int = 4


SIZES = Sizes()


def print_table(layers: int, repeats: int, impl: str) -> None:
    """Train without checkpoints, with ours and with torch's; print times and memory of a step.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        LaunchError: the rank failed, or ours computes something else than torch's.
    """
    lessons = chosen.find(impl, TASKS)
    (measured,) = launch.run(measure_on_rank, 1, lessons, SIZES, layers, repeats, backend="gloo")
    title = f"{layers} layers, {isqrt(layers)} segments: median of {repeats} steps"
    Console().print(rivals.table(title, measured, RIVALS, (rivals.STEP, rivals.PEAK)))
    print(rivals.WHOSE[impl], rivals.PARENTHESES, rivals.PEAK_MEMORY, sep="\n")


def measure_on_rank(
    lessons: Submission, sizes: Sizes, num_layers: int, repeats: int
) -> dict[str, Measured]:
    """Measure steps without checkpoints, with ours and with torch's."""
    lesson: Any = chosen.lesson(lessons, "activation_checkpointing")
    layers, x = _layers(sizes, num_layers), torch.randn(*sizes[:3])
    segments = isqrt(num_layers)
    torchs: Any = checkpoint.checkpoint_sequential
    forwards: dict[str, Callable[[nn.Sequential], Tensor]] = {
        KEPT: lambda model: model(x),
        OURS: lambda model: lesson.checkpoint_sequential([*model], segments, x),
        TORCHS: lambda model: torchs(model, segments, x, use_reentrant=False),
    }
    contestants = {name: _contestant(copy.deepcopy(layers), f) for name, f in forwards.items()}
    return rivals.measure(contestants, RIVALS, repeats)


def _layers(sizes: Sizes, num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(course.given_2.Block(sizes.width, sizes.heads) for _ in range(num_layers))
    )


def _contestant(model: nn.Sequential, forward: Callable[[nn.Sequential], Tensor]) -> Contestant:
    def step() -> float:
        loss = forward(model).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return Contestant(model, step)
