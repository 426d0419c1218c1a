"""Host settings during a simulation: no preemption, one core, few garbage collections.

A rank that hands over wakes the next thread and then blocks. If the woken thread ran immediately,
it would find the interpreter's lock still held and go back to sleep, which doubles the work. Also,
every operation creates objects, so with the default settings the collector would scan all of torch
again and again.
"""

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

YOUNG_OBJECTS = 50_000  # threshold of the collector; its default, 700, doubles the time per message


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Apply all three settings inside the block, and restore the previous ones afterwards."""
    with _few_collections(), _no_preemption(), one_core():
        yield


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect rarely.

    If the caller has already frozen objects, no more are frozen.
    """
    thresholds, was_enabled, is_ours = gc.get_threshold(), gc.isenabled(), not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    if thresholds[0]:  # 0 means that collection is disabled
        gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_ours:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _no_preemption() -> Iterator[None]:
    """Let this thread and those it starts keep running after they wake another (Linux only).

    This affects only speed. A process whose scheduling policy is not the default one keeps it.
    """
    is_ordinary = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    if is_ordinary:
        _set_policy("SCHED_BATCH")
    try:
        yield
    finally:
        if is_ordinary:
            _set_policy("SCHED_OTHER")


def _set_policy(name: str) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid the call
        os.sched_setscheduler(0, getattr(os, name), os.sched_param(0))


HAND_OVERS = 8  # hand-overs timed in each run
RUNS = 3  # timed runs; the fastest one counts
SPARE = 0.5  # idle cores required, because other work might share the core of a pinned thread
FAST_S = 15e-6  # a hand-over between two cores takes at least this long


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Pin this thread and those it starts to the current core if that makes hand-overs fast."""
    free = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    if len(free) < 2 or os.getloadavg()[0] > len(free) - SPARE:
        yield
        return
    try:
        os.sched_setaffinity(0, {_core()} & free or free)
        if hand_over_s() > FAST_S:
            os.sched_setaffinity(0, free)
        yield
    finally:
        os.sched_setaffinity(0, free)


def hand_over_s() -> float:
    """Return the measured time, in seconds, from waking a thread until it runs."""
    return min(_hand_over_s() for _ in range(RUNS))


def _hand_over_s() -> float:
    ping, pong = threading.Lock(), threading.Lock()
    ping.acquire()
    pong.acquire()

    def answer() -> None:
        for _ in range(HAND_OVERS):
            ping.acquire()
            pong.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    start = time.perf_counter()
    for _ in range(HAND_OVERS):
        ping.release()
        pong.acquire()
    seconds = time.perf_counter() - start
    thread.join()
    return seconds / (2 * HAND_OVERS)


def _core() -> int:
    """Return the core on which the calling thread runs."""
    fields = Path("/proc/thread-self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[36])
