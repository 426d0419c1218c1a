"""Helpers of all notebooks: whose functions they show, and how passes are measured."""

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

# A GPU so slow that small matrices take a millisecond, and messages that take no time.
_SLOW_GPU = GPU("16 GFLOP/s", 80e9, 1e30, {"float32": 16e9}, {"float32": 16e9})
IDEAL = Cluster(1, 4, gpu=_SLOW_GPU, latency_s=0.0, nvlink_bytes_per_s=1e30, name="ideal")


def try_yours(lesson: str, names: str, experiment: Callable[..., T]) -> T:
    """Return what an experiment finds with the learner's functions, or with the solution's.

        try_yours("phase1_data_parallel.collectives", "broadcast", draw)
        broadcast: not written yet, so you see the solution.

    Args:
        lesson: the phase and the lesson.
        names: one or more names of the lesson, separated by spaces.
        experiment: is called with them; it runs them in a world of its own, so that whatever they
            do ends in a result or a LaunchError.

    Raises:
        SystemExit: the learner's fail, and this copy of the course has no solutions.
    """
    label = names.replace(" ", ", ")
    try:
        found = experiment(*_members(lessons.template_at(lesson), names))
    except Exception as error:  # a file of the learner's may raise anything when it is imported
        reason = _why(error, names)
    else:
        print(f"{label}: you see your own.")
        return found
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
    """Say that something is a TODO, and what if it is not all; or quote the error's first line."""
    is_raised = isinstance(error, LaunchError) and error.exception == NotImplementedError.__name__
    if is_raised or isinstance(error, NotImplementedError):
        todo = re.search(r"Task [\d.]+: ([\w.]+)", str(error))
        return f"{todo[1]} is not written yet" if todo and todo[1] != names else "not written yet"
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return f"not working yet ({first})"


Span = tuple[float, float]  # first and last second


def watch_passes(module: nn.Module, spans: list[Span]) -> None:
    """Note from when to when each forward and each backward pass through a module runs.

    Args:
        module: its input must require a gradient, or its backward passes have no end.
        spans: a span is appended for each pass when it ends.
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
