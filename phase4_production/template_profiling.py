"""Profiling: what a rank's steps consist of, and what they wait for.

Task 4.18. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade it: ``distlab check 4.18``.
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

    With the defaults, where the warm-up absorbs the slow first use of the profiler:
        step(0)    step(1)    step(2)    step(3)    step(4)
        off        warm-up    recorded   recorded   recorded   -> rank-00003.json

    All ranks of the group call this; none waits for another.

    Args:
        step: function that runs a training step; called with 0, 1, …, in order.
        folder: folder for the traces, created if it is missing.
        wait: number of steps that run without the profiler.
        warmup: number of steps that run with a profiler that keeps nothing.
        active: number of steps that are recorded, at least 1. Each is enclosed in an event
            ``ProfilerStep#…``.
        group: the ranks that are profiled; all ranks by default.

    Returns:
        The path of this rank's file, such as ``folder/rank-00003.json``, with at least five digits:
        a trace in Chrome's format. The profiler is off again.
    """
    # TODO 4.18: run the steps under the profiler, and write the trace of this rank.
    #   Tools: profile, schedule (its repeat), on_trace_ready, export_chrome_trace, profiler.step.
    #   Example: wait=1, warmup=1, active=3: 5 steps, and the events ProfilerStep#2, #3 and #4.
    #   About 10 lines.
    raise NotImplementedError(
        "Task 4.18: profile_steps, see guidelines.md#418-see-what-a-step-waits-for"
    )


def exposed_communication(trace: Path) -> Exposed:
    """Return how much of a step is communication, and how much of that no computation hides.

    One step, in ms; two collectives overlap, and 3 ms of communication are exposed:
        compute         ████████        ████          0 to 4 and 8 to 10
        communication       ▒▒▒▒▒▒                    2 to 5
                                ▒▒▒▒▒▒                4 to 7            together 5, of which 3
        step            ────────────────────          0 to 10           exposed: 4 to 7

    Events that count, all with ph "X"; ts and dur are in µs:
        a step           cat is "user_annotation", name begins with "ProfilerStep#"
        communication    cat is "kernel", name begins with "nccl"
                         cat is "user_annotation", name begins with "gloo:"
        computation      if any event's cat is "kernel": the other events with this cat
                         else cat is "cpu_op", name begins with "aten::", and pid and tid are those
                         of a step: launching and waiting have other names

    Events of all streams and threads count together: where two overlap, the time counts once. Of an
    event that lies partly outside the steps, only the part inside counts. Steps don't overlap.

    Args:
        trace: trace of one rank, as from ``profile_steps``; the events are under ``traceEvents``,
            in any order.

    Returns:
        Seconds per step, averaged over the steps.

    Raises:
        ValueError: the trace holds no step; the message names the file.
    """
    # TODO 4.18: measure what communication and computation cover, in the steps alone.
    #   Tools: json.loads, sorted.
    #   Example: covered are 5 ms by communication, 6 ms by computation and 9 ms by either of them:
    #   9 - 6 = 3 ms are exposed.
    #   About 45 lines with helpers.
    raise NotImplementedError(
        "Task 4.18: exposed_communication, see guidelines.md#418-see-what-a-step-waits-for"
    )
