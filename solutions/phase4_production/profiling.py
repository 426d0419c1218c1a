"""Profiling: what a rank's steps consist of, and what they wait for."""

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
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dist.get_rank(group):05}.json"
    with profile(
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for index in range(wait + warmup + active):
            step(index)
            profiler.step()
    return path


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
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if _is(e, "user_annotation", "ProfilerStep#")]
    if not steps:
        raise ValueError(f"{trace}: no event ProfilerStep#…: were the steps profiled?")
    communication = [*filter(_is_communication, events)]
    compute = _computation(events, steps)
    communication_us = _covered_us(_within(steps, communication))
    compute_us = _covered_us(_within(steps, compute))
    either_us = _covered_us(_within(steps, communication + compute))
    step_us = sum(event["dur"] for event in steps)
    all_us = (step_us, communication_us, either_us - compute_us)
    return Exposed(*(us / len(steps) / 1e6 for us in all_us))


def _is(event: Event, cat: str, beginning: str = "") -> bool:
    """Return whether an event has category ``cat`` and a name that begins with ``beginning``."""
    return event.get("cat") == cat and event["name"].startswith(beginning)


def _is_communication(event: Event) -> bool:
    """Return whether an event is communication."""
    return _is(event, "kernel", "nccl") or _is(event, "user_annotation", "gloo:")


def _computation(events: list[Event], steps: list[Event]) -> list[Event]:
    """Return the events that are computation."""
    if kernels := [e for e in events if _is(e, "kernel")]:
        return [e for e in kernels if not _is_communication(e)]
    threads = {(step["pid"], step["tid"]) for step in steps}
    return [e for e in events if _is(e, "cpu_op", "aten::") and (e["pid"], e["tid"]) in threads]


def _within(steps: list[Event], events: list[Event]) -> list[Interval]:
    """Return the parts of events that lie inside steps."""
    return [
        (max(a, begin), min(b, end))
        for begin, end in map(_interval, steps)
        for a, b in map(_interval, events)
        if a < end and b > begin
    ]


def _interval(event: Event) -> Interval:
    """Return when an event begins and ends."""
    return event["ts"], event["ts"] + event["dur"]


def _covered_us(intervals: Iterable[Interval]) -> float:
    """Return how much time the intervals cover, counting overlaps once."""
    covered, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
