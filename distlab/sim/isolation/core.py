"""One core for all ranks, where handing over is faster so (Linux only).

Of all ranks one runs at a time, so more cores do not help; and a thread that is woken on another
core waits until that core is awake. How long depends on the machine, and on chance:

    two-core virtual machine    3.5 µs on one core, 3.5 to 300 µs on two
    another machine             28 µs on one core, 6 µs on many

So it is measured on one core, which takes a fraction of a millisecond.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HAND_OVERS = 8  # in each of a few runs, of which the fastest counts
RUNS = 3
SPARE = 0.5  # of the cores: where others compute, one core may be shared while another is idle
FAST_S = 15e-6  # as fast as it gets between cores, or faster


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on the core on which it is, if that is fast there."""
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
    """Measure how long it takes until a thread that is woken goes on, as things are now."""
    return min(_hand_over_s() for _ in range(RUNS))


def _hand_over_s() -> float:
    mine, others = threading.Lock(), threading.Lock()
    mine.acquire()
    others.acquire()

    def answer() -> None:
        for _ in range(HAND_OVERS):
            others.acquire()
            mine.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    start = time.perf_counter()
    for _ in range(HAND_OVERS):
        others.release()
        mine.acquire()
    seconds = time.perf_counter() - start
    thread.join()
    return seconds / (2 * HAND_OVERS)


def _core() -> int:
    """Return the core on which the calling thread runs."""
    fields = Path("/proc/thread-self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[36])
