"""In which turns the production trainer and its rival train, and how fast that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from distlab import launch, lessons
from distlab.bench import saving
from distlab.bench.trainer_contestants import Contestant, Losses, Setting, trainer
from distlab.production.config import Config
from distlab.production.lessons import Lessons
from distlab.production.telemetry import measure

LARGEST_DIFFERENCE = 0.02  # of the mean losses of the first steps, as a part of one
Rival = tuple[str, Callable[[Setting], Contestant]]  # its name, and what makes it


@dataclass(frozen=True)
class Speed:
    """How fast a contestant trains, in each round.

    Attributes:
        images_per_s: of all ranks, by round.
        mfu: model FLOPs utilisation in the median round; None on a CPU, whose peak is not known.
    """

    images_per_s: list[float]
    mfu: float | None

    @property
    def median(self) -> float:
        """The median of all rounds, in images/s."""
        return saving.quartiles(self.images_per_s)["median"]


@dataclass(frozen=True)
class Compared:
    """A line of the table."""

    ours: Speed
    rival: str | None
    theirs: Speed | None

    @property
    def ratio(self) -> float | None:
        """Ours over torch's: of the medians."""
        return self.ours.median / self.theirs.median if self.theirs else None

    @property
    def ratios(self) -> dict[str, float] | None:
        """The quartiles of what it is in each round."""
        if self.theirs is None:
            return None
        rounds = zip(self.ours.images_per_s, self.theirs.images_per_s, strict=True)
        return saving.quartiles([ours / theirs for ours, theirs in rounds])


def measure_on_rank(
    configs: Mapping[str, Config],
    found: Mapping[str, Lessons],
    rival: Rival | None,
    steps: int,
    repeats: int,
) -> dict[str | None, Speed]:
    """Measure the trainer in all its ways, and its rival, in turns.

    Raises:
        ValueError: in the first steps, the mean losses differ.
    """
    device = torch.device(launch.context().device)
    terminal = sys.stderr  # while they are open, trainers have another
    with ExitStack() as stack:
        contestants: dict[str | None, Contestant] = {}
        for name, config in configs.items():
            setting = Setting(config, found[name], device)
            contestants[name] = stack.enter_context(trainer(setting))
        if rival:
            contestants[rival[0]] = rival[1](setting)
        first = {name: _mean(run(steps)) for name, run in contestants.items()}  # warms up, too
        _check(first)
        seconds = _times([*contestants.values()], steps, repeats, terminal)
        num_images = steps * setting.config.batch_size
        rates = (num_images / seconds).tolist()
        mfu_of_1 = _mfu_of_an_image(setting)
        return {
            name: Speed(rate, mfu_of_1 and mfu_of_1 * saving.quartiles(rate)["median"])
            for name, rate in zip(contestants, rates, strict=True)
        }


def _mfu_of_an_image(setting: Setting) -> float | None:
    """Return which part of the peak of all ranks one image per second is."""
    if setting.device.type != "cuda":
        return None
    costs = measure(setting.model(), setting.config, setting.lessons)
    return costs.flops_per_image / (costs.peak_flops_per_s * dist.get_world_size())


def _mean(losses: Losses) -> float:
    """Return the mean over the images of all ranks."""
    sums = torch.tensor([float(losses.total), losses.num_images], dtype=torch.float64)
    sums = sums.to(lessons.given_4.group_device())
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _check(means: Mapping[str | None, float]) -> None:
    expected = [*means.values()][-1]
    for name, mean in means.items():
        if not abs(mean - expected) <= LARGEST_DIFFERENCE * expected:
            raise ValueError(
                f"they do not learn the same: in the first steps, the mean loss of {name} is "
                f"{mean:.4g}, and another's is {expected:.4g}"
            )


def _times(contestants: Sequence[Contestant], steps: int, repeats: int, terminal: TextIO) -> Tensor:
    """Return seconds (contestants, repeats) of the slowest rank; every second time backwards."""
    seconds = torch.zeros(len(contestants), repeats, dtype=torch.float64)
    in_turn = [*enumerate(contestants)]
    for repeat in range(repeats):
        for row, run in in_turn[:: -1 if repeat % 2 else 1]:
            dist.barrier()  # start together
            start = perf_counter()
            run(steps)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[row, repeat] = perf_counter() - start
        if dist.get_rank() == 0:
            took = f"{float(seconds[:, repeat].sum()):.0f} s"
            print(f"round {repeat + 1} of {repeats}: {took}", file=terminal, flush=True)
    shared = seconds.to(lessons.given_4.group_device())
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.cpu()
