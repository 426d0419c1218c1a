"""Helpers for the notebooks.

They run an experiment with the learner's functions or the solution's, and record when forward and
backward passes start and end.
"""

import re
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from distlab import lessons
from distlab.launch import LaunchError
from distlab.sim import GPU, Cluster

T = TypeVar("T")

# A GPU on which small matrix products take a millisecond, and links that cost no time.
_SLOW_GPU = GPU("16 GFLOP/s", 80e9, 1e30, {"float32": 16e9}, {"float32": 16e9})
IDEAL = Cluster(1, 4, gpu=_SLOW_GPU, latency_s=0.0, nvlink_bytes_per_s=1e30, name="ideal")


def try_yours(lesson: str, names: str, experiment: Callable[..., T]) -> T:
    """Run an experiment with the learner's functions or, if they fail, with the solution's.

        try_yours("phase1_data_parallel.collectives", "broadcast", draw)
        broadcast: not written yet, so you see the solution.

    Args:
        lesson: Phase and lesson, separated by a dot.
        names: One or more functions of the lesson, separated by spaces.
        experiment: Function that takes these functions and runs them in a separate world, so that
            every failure is a LaunchError.

    Raises:
        SystemExit: The learner's functions fail, and this copy of the course has no solutions.
    """
    label = names.replace(" ", ", ")
    try:
        result = experiment(*_members(lessons.template_at(lesson), names))
    except Exception as error:  # importing a learner's file may raise anything
        reason = _why(error, names)
    else:
        print(f"{label}: you see your own.")
        return result
    try:
        solved = _members(lessons.solution_at(lesson), names)
    except ModuleNotFoundError:
        raise SystemExit(
            f"{label}: {reason}, and this copy of the course has no solutions."
        ) from None
    print(f"{label}: {reason}, so you see the solution.")
    return experiment(*solved)


def _members(module: ModuleType, names: str) -> list[Any]:
    return [getattr(module, name) for name in names.split()]


def _why(error: Exception, names: str) -> str:
    """Return the reason for a failure: a function is still a TODO, or the error's first line."""
    is_raised = isinstance(error, LaunchError) and error.exception == NotImplementedError.__name__
    if is_raised or isinstance(error, NotImplementedError):
        todo = re.search(r"Task [\d.]+: ([\w.]+)", str(error))
        return f"{todo[1]} is not written yet" if todo and todo[1] != names else "not written yet"
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return f"not working yet ({first})"


Span = tuple[float, float]  # start and end in seconds


def watch_passes(module: nn.Module, spans: list[Span]) -> None:
    """Record the start and end of each forward and backward pass through a module.

    Args:
        module: Module to watch. Its input must require a gradient; otherwise, the end of the
            backward pass cannot be observed.
        spans: List to which each pass is appended when it ends.
    """
    starts: list[float] = []

    def start(*_: object) -> None:
        starts.append(time.perf_counter())

    def end(*_: object) -> None:
        spans.append((starts.pop(), time.perf_counter()))

    module.register_forward_pre_hook(start)
    module.register_forward_hook(end)
    module.register_full_backward_pre_hook(start)
    module.register_full_backward_hook(end)
