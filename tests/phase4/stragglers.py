"""Bodies for task 4.16: ranks that tell a detector of their steps."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.grade import WrongResult
from judging.calls import typed
from phase4_production.given import StepTimes

Work = tuple[float, float]  # data, compute
Told = list[tuple[int, str, float]]


def watch(
    lesson: Any, steps: Sequence[Sequence[Work]], options: Mapping[str, Any], group: Any = None
) -> list[Told]:
    """Add steps, in each of which all ranks wait for the slowest.

    Args:
        lesson: of the learner.
        steps: what each rank has to do, step by step.
        options: of the detector.
        group: that is watched.

    Returns:
        What was told after each step.
    """
    options = {**options, "group": group} if group else options
    detector, told = lesson.StragglerDetector(**options), []
    for works in steps:
        step_s = max(map(sum, works)) + 0.5
        data_s, compute_s = works[dist.get_rank(group)]
        waited_s = step_s - data_s - compute_s - 0.25
        told.append(_taken(detector.add(StepTimes(step_s, data_s, compute_s, waited_s))))
    return told


def _taken(found: Any) -> Told:
    """Take a verdict apart.

    Raises:
        WrongResult: it is something else.
    """
    for straggler in typed("add", found, list):
        if type(straggler).__name__ != "Straggler":
            raise WrongResult(f"add should return a list of Straggler; {straggler!r:.60} is in it")
    return [(int(each.rank), str(each.part), float(each.ratio)) for each in found]


def train(lesson: Any, seconds: Sequence[Work], window: int) -> list[Told]:
    """Train for a window, on the clock of the world, with steps that end together."""
    detector, told = lesson.StragglerDetector(window=window), []
    data_s, compute_s = seconds[dist.get_rank()]
    for _ in range(window):
        began_s = time.perf_counter()
        time.sleep(data_s + compute_s)
        ready_s = time.perf_counter()
        dist.all_reduce(torch.ones(1))
        ended_s = time.perf_counter()
        times = StepTimes(ended_s - began_s, data_s, compute_s, ended_s - ready_s)
        told.append(_taken(detector.add(times)))
    return told
