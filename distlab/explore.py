"""Helpers for the notebooks.

They choose the learner's functions or the solution's, and record when forward and backward passes
start and end.
"""

import re
import time
from collections.abc import Collection
from typing import Any

from torch import nn

from distlab import lessons
from distlab.learner import source
from distlab.sim import GPU, Cluster

TODO = "raise NotImplementedError("

# A GPU on which small matrix products take a millisecond, and links that cost no time.
_SLOW_GPU = GPU("16 GFLOP/s", 80e9, 1e30, {"float32": 16e9}, {"float32": 16e9})
IDEAL = Cluster(1, 4, gpu=_SLOW_GPU, latency_s=0.0, nvlink_bytes_per_s=1e30, name="ideal")


def yours(lesson: str, names: str) -> Any:
    """Return functions or classes of a lesson: the learner's or, for a TODO, the solution's.

        ring_all_reduce = yours("phase3_multi_node.ring_allreduce", "ring_all_reduce")
        ring_all_reduce is not written yet: this is the solution's.

    A function that uses one that is still to be written is the solution's, too.

    Args:
        lesson: Phase and lesson, separated by a dot.
        names: One or more functions or classes of the lesson, separated by spaces.

    Returns:
        The function, or a list of them for several names.

    Raises:
        SystemExit: A function is still to be written, and this copy of the course has no solutions.
        Exception: The learner's file cannot be imported.
    """
    missing = _to_write(lesson)
    functions = [_chosen(lesson, name, missing) for name in names.split()]
    return functions if len(functions) > 1 else functions[0]


def _chosen(lesson: str, name: str, missing: Collection[str]) -> Any:
    if name not in missing:
        return getattr(lessons.template_at(lesson), name)
    try:
        solved = getattr(lessons.solution_at(lesson), name)
    except ModuleNotFoundError:
        raise SystemExit(
            f"{name} is still to be written, and this copy of the course has no solutions."
        ) from None
    print(f"{name} is not written yet: this is the solution's.")
    return solved


def _to_write(lesson: str) -> set[str]:
    """Return the names of a lesson that are still to be written, or use others that are."""
    phase, _, name = lesson.rpartition(".")
    text = source.read(lessons.COURSE / phase / f"template_{name}.py")
    functions = source.functions(text)
    missing = {name for name, code in functions.items() if TODO in code}
    missing |= {name.partition(".")[0] for name in missing}
    while True:
        users = {name for name in functions if _mentions(functions[name], missing)} - missing
        if not users:
            return missing
        missing |= users | {name.partition(".")[0] for name in users}


def _mentions(code: str, names: Collection[str]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", code) for name in names)


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
