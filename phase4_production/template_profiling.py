"""Profiling: what the steps of a rank consist of, and for what they wait.

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
    """Run some steps, and write down what happens in the last of them: a trace for Perfetto.

    With the defaults; the first use of the profiler is slow, which the warm-up takes upon itself:
        step(0)    step(1)    step(2)    step(3)    step(4)
        off        warm-up    recorded   recorded   recorded   -> rank-00003.json

    All ranks of the group call it. It waits for no other rank.

    Args:
        step: does a step of training; it is called with 0, 1, …, one call after the other.
        folder: made if it is missing.
        wait: how many steps run without the profiler.
        warmup: how many steps run with a profiler that keeps nothing.
        active: how many steps are recorded; at least 1. Each of them is within an event
            ``ProfilerStep#…``.
        group: the ranks; all ranks by default.

    Returns:
        The file of this rank, such as ``folder/rank-00003.json``, with five digits at least: a
        trace in Chrome's format. The profiler is off again.
    """
    # TODO 4.18: run the steps under the profiler, and write the trace of this rank.
    #   Tools: profile, schedule (its repeat), on_trace_ready, export_chrome_trace, profiler.step.
    #   Example: wait=1, warmup=1, active=3: 5 steps, and the events ProfilerStep#2, #3 and #4.
    #   About 10 lines.
    raise NotImplementedError(
        "Task 4.18: profile_steps, see guidelines.md#418-see-what-a-step-waits-for"
    )


def exposed_communication(trace: Path) -> Exposed:
    """Tell how much of a step is communication, and how much of that no computation hides.

    One step, in ms; two collectives overlap, and 3 ms of communication are exposed:
        compute         ████████        ████          0 to 4 and 8 to 10
        communication       ▒▒▒▒▒▒                    2 to 5
                                ▒▒▒▒▒▒                4 to 7            together 5, of which 3
        step            ────────────────────          0 to 10           exposed: 4 to 7

    What counts, of all events with ph "X"; ts and dur are in µs:
        a step           cat is "user_annotation", name begins with "ProfilerStep#"
        communication    cat is "kernel", name begins with "nccl"
                         cat is "user_annotation", name begins with "gloo:"
        computation      if any event's cat is "kernel": the other ones with this cat
                         else cat is "cpu_op", name begins with "aten::", and pid and tid are those
                         of a step: launching and waiting have other names

    Events of all streams and threads count together: where two overlap, the time counts once. Of an
    event that is partly outside of the steps, the part inside counts. Steps don't overlap.

    Args:
        trace: trace of one rank, as from ``profile_steps``; the events are under ``traceEvents``,
            in any order.

    Returns:
        Seconds, each divided by the number of steps.

    Raises:
        ValueError: the trace holds no step; the text names the file.
    """
    # TODO 4.18: measure what communication and computation cover, in the steps alone.
    #   Tools: json.loads, sorted.
    #   Example: covered are 5 ms by communication, 6 ms by computation and 9 ms by either of them:
    #   9 - 6 = 3 ms are exposed.
    #   About 45 lines with helpers.
    raise NotImplementedError(
        "Task 4.18: exposed_communication, see guidelines.md#418-see-what-a-step-waits-for"
    )
