"""How long a rank has waited for others, without doing anything."""

import re
import sys
import threading
import time
from pathlib import Path

from distlab.launch.stacks import Place, place_of

MAX_SHARE = 0.03  # of a core: a process that uses more may be moving data


class Idleness:
    """The time for which the main thread has slept in one call of torch.distributed.

    On a busy machine a loop of small collectives uses as little of the CPU as a deadlock, but its
    thread wakes up. Waits that poll, as those for MPI and GPUs do, never count as idle, and neither
    do any without Linux's /proc.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew."""
        self._since_s = self._last_s = time.monotonic()
        self._last_cpu_s = time.process_time()
        self._last: tuple[Place, float] | None = None

    def span(self) -> tuple[float, float]:
        """Return since when the rank has been idle, and now; called several times a second.

        Both are readings of ``time.monotonic``, which all processes of a machine share.
        """
        now_s, cpu_s = time.monotonic(), time.process_time()
        place = place_of(sys._current_frames()[threading.main_thread().ident or 0])
        here = place, _num_wake_ups()
        share = (cpu_s - self._last_cpu_s) / max(now_s - self._last_s, 1e-3)
        if not place.operation or here != self._last or share > MAX_SHARE:
            self._since_s = now_s
        self._last_s, self._last_cpu_s, self._last = now_s, cpu_s, here
        return self._since_s, now_s


def _num_wake_ups() -> float:
    """Return how often the main thread has slept; a new number each time if that is unknown."""
    status = Path(f"/proc/self/task/{threading.main_thread().native_id}/status")
    if not status.exists():
        return time.monotonic()
    known = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.MULTILINE)
    return int(known[1]) if known else time.monotonic()
