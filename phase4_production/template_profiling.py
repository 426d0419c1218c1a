"""Profiling: what a rank's steps consist of, and what they wait for.

Task 4.18. The docstring says what a function promises, its TODO gives an example, and guidelines.md
explains why and how. To grade it: ``distlab check 4.18``.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, schedule

from phase4_production.given import Exposed, Group

Event = dict[str, Any]  # event of a trace: name, cat, ph, ts and dur in µs, pid, tid
Interval = tuple[float, float]  # start and end in µs


def profile_steps(
    step: Callable[[int], object],
    folder: Path,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    group: Group = None,
) -> Path:
    """Run some steps, and record the last ones in a trace for Perfetto.

    With the defaults, five steps run, and the warm-up absorbs the slow first use of the profiler:
        step(0)    step(1)    step(2)    step(3)    step(4)
        off        warm-up    recorded   recorded   recorded   -> rank-00003.json

    All ranks of the group call this; none waits for another.

    Args:
        step: function that runs a training step; called with 0, 1, …, in order.
        folder: folder for the traces, created if it is missing.
        wait: number of steps that run without the profiler.
        warmup: number of steps that run with the profiler on, but are not recorded.
        active: number of steps that are recorded, at least 1. Each is enclosed in an event
            ``ProfilerStep#…``.
        group: the ranks that are profiled; all ranks by default.

    Returns:
        The path of this rank's trace, such as ``folder/rank-00003.json``; the rank is written with
        at least five digits. The trace is in Chrome's format. On return, the profiler is off again.
    """
    # TODO 4.18: run the steps under the profiler, and write the trace of this rank.
    #   Example: wait=1, warmup=1, active=3: 5 steps, and the events ProfilerStep#2, #3 and #4.
    #   About 10 lines.
    raise NotImplementedError(
        "Task 4.18: profile_steps, see guidelines.md#418-see-what-a-step-waits-for"
    )


def exposed_communication(trace: Path) -> Exposed:
    """Return how long a step communicates, and for how much of that time it does not compute.

    In this step, two collectives overlap, and 3 ms of communication are exposed (times in ms):
        compute         ████████        ████          0 to 4 and 8 to 10
        communication       ▒▒▒▒▒▒                    2 to 5
                                ▒▒▒▒▒▒                4 to 7            together: 2 to 7
        step            ────────────────────          0 to 10           exposed: 4 to 7

    Only the following events count, all of which have ph "X"; ts and dur are in µs:
        a step           cat is "user_annotation", name begins with "ProfilerStep#"
        communication    cat is "kernel", name begins with "nccl"
                         or cat is "user_annotation", name begins with "gloo:"
        computation      if any event's cat is "kernel": all other events with this cat
                         otherwise: cat is "cpu_op", name begins with "aten::" (launching and
                         waiting have other names), and pid and tid are those of a step

    Events of all streams and threads count together: where two overlap, the time counts once. If an
    event lies partly outside the steps, only the part inside them counts. Steps don't overlap.

    Args:
        trace: trace of one rank, as written by ``profile_steps``; the events are under
            ``traceEvents``, in any order.

    Returns:
        Seconds per step, averaged over the steps.

    Raises:
        ValueError: the trace holds no step; the message names the file.
    """
    # TODO 4.18: measure what communication and computation cover, in the steps alone.
    #   Example: covered are 5 ms by communication, 6 ms by computation and 9 ms by either of them:
    #   9 - 6 = 3 ms are exposed.
    #   About 45 lines with helpers.
    raise NotImplementedError(
        "Task 4.18: exposed_communication, see guidelines.md#418-see-what-a-step-waits-for"
    )
