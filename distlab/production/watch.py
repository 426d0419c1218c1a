"""A thread that ends this process when a rank has gone silent, so that a launcher restarts it."""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from distlab.production.config import Config
from distlab.production.hang import Evidence
from distlab.production.lessons import Lessons
from distlab.production.saving import leave_code

POLL_S = 0.5
TOUCH_S = 1.0  # shortest time between two changes of the heartbeat file
PLACES = 10**6  # places in a step, more than it has waits
WATCHERS = 2  # ranks 0 and 1, because either may be the one that hangs
EXIT_SILENT = 1  # restarting helps


class Unwatched:
    """Takes the place of a ``Watch`` where no launcher starts ranks anew: simulated or over MPI."""

    busy_s = 0.0

    def beat(self, step: int) -> None:
        """Do nothing."""

    def busy(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""


def watch_of(config: Config, lessons: Lessons, step: int) -> "Watch | Unwatched":
    """Return a watch of all ranks if they are processes that a launcher may start anew.

    Args:
        step: Number of steps that have been trained already.
    """
    is_watched = dist.get_backend() in ("gloo", "nccl")
    has_hearts = hasattr(lessons("fault_tolerance"), "Heartbeat")  # no stand-in has
    return Watch(config, lessons, step) if is_watched and has_hearts else Unwatched()


class Watch:
    """Reports that this rank is alive, and checks that the others are.

    If a rank hangs or is stopped, collectives wait for it for half an hour or forever, while the
    launcher only sees that all processes exist. Ranks 0 and 1 therefore watch all heartbeats. When
    one has been missing for ``heartbeat_timeout_s``, they end their own processes, and torchrun
    ends and restarts all ranks. A rank also ends when its launcher has died, so that the next run
    in the same folder does not meet ranks of this one. The file ``run_dir``/heartbeat.rank<r> is
    for outside observers.

    A rank counts the places at which it waits for others. When all ranks are silent, those wait
    whose places are higher, and the rank with the lowest place is the one that they wait for. In
    this example, rank 1 is stopped in its backward pass of step 33:
        rank 0    step 32, before the agreement    step 33, before the all-reduce    waits
        rank 1    step 32, before the agreement                                      is silent
    """

    def __init__(self, config: Config, lessons: Lessons, step: int) -> None:
        """Join a store that all ranks share, and start to watch; called on all ranks."""
        self.rank, self.timeout_s = dist.get_rank(), config.heartbeat_timeout_s
        self.run_dir = config.run_dir
        self.file = config.run_dir / f"heartbeat.rank{self.rank}"
        lesson = lessons("fault_tolerance")
        store = _store(self.timeout_s)
        self.lock, self.is_busy, self.busy_s = threading.Lock(), False, 0.0
        self.heart = lesson.Heartbeat(store, self.rank)
        self.evidence, self.beaten_s = Evidence(config.run_dir), time.monotonic()
        self.place, self.sent, self.touched = step * PLACES, -1, -1  # the latter two: reported
        self.touched_s = -math.inf
        self.poll_s = min(POLL_S, self.timeout_s / 4)
        self.parent, self.ended = os.getppid(), threading.Event()
        self._report()
        self.silent, self.polled_s = "", math.inf  # inf: a rank without a monitor awaits no answer
        if self.rank < WATCHERS and dist.get_world_size() > 1:
            connection = store.clone()  # two threads must not share one
            size = dist.get_world_size()
            monitor = lesson.HeartbeatMonitor(connection, size, timeout_s=self.timeout_s)
            self.polled_s = time.monotonic()
            threading.Thread(target=self._poll, args=(monitor,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, step: int) -> None:
        """Note that this rank has done its own part, and now waits for the others.

        All ranks call this before the same waits. The first one in a step is sent at once, and the
        thread sends the others if they last.

        Args:
            step: Step that the rank is in, or that it has done last.
        """
        before, self.place = self.place, max(self.place + 1, step * PLACES)
        if self.place // PLACES > before // PLACES:
            self._send()

    @property
    def step(self) -> int:
        """Step that this rank is in, or that it has done last."""
        return self.place // PLACES

    def _send(self) -> None:
        with self.lock:
            self.sent, self.beaten_s = self.place, time.monotonic()
            self.heart.beat(self.sent, self.busy_s)

    def _report(self) -> None:
        """Send this rank's place, and touch the file, if the place is new or the rank is busy."""
        if self.is_busy or self.place != self.sent:
            with suppress(RuntimeError):  # rank 0, which hosts the store, is gone
                self._send()
        is_due = time.monotonic() >= self.touched_s + TOUCH_S
        if is_due and (self.is_busy or self.place != self.touched):
            self.touched, self.touched_s = self.place, time.monotonic()
            with suppress(OSError):  # a full disk
                self.file.touch()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep reporting in the block; long work, such as a last save, must not be cut short."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()

    def _poll(self, monitor: Any) -> None:
        """Poll the heartbeats; this blocks forever if the rank that hosts the store is stopped."""
        while not self.ended.wait(self.poll_s) and not self.silent:
            self.silent = self._silent_ranks(monitor)
            self.polled_s = time.monotonic()

    def _silent_ranks(self, monitor: Any) -> str:
        """Describe the ranks that have been silent for too long; "" if there are none."""
        try:
            silent = [health for health in monitor.poll() if health.status == "silent"]
        except RuntimeError as error:  # the rank that hosts the store is gone
            return f"rank 0 does not answer ({str(error).splitlines()[0]:.100})"
        names = ", ".join(f"rank {h.rank} (step {max(h.step, 0) // PLACES})" for h in silent)
        return names and f"silent for more than {self.timeout_s:g} s: {names}"

    def _watch(self) -> None:
        while not self.ended.wait(self.poll_s):
            self._report()
            self.evidence.update(time.monotonic() - self.beaten_s, self.timeout_s, self.step)
            if reason := self._orphaned() or self.silent or self._unanswered():
                self._end(reason)
                return
        self.evidence.close()

    def _unanswered(self) -> str:
        """Return a message if rank 0, which hosts the heartbeats, does not answer; otherwise ""."""
        is_late = time.monotonic() > self.polled_s + self.timeout_s
        return f"rank 0 does not answer for more than {self.timeout_s:g} s" if is_late else ""

    def _orphaned(self) -> str:
        """Return a message if the launcher, which no rank may outlive, has died; otherwise ""."""
        is_launched = "TORCHELASTIC_RUN_ID" in os.environ
        return "its launcher has died" if is_launched and os.getppid() != self.parent else ""

    def _end(self, reason: str) -> None:
        if self.ended.is_set():
            return
        print(f"rank {self.rank}: {reason}. This process ends.", file=sys.stderr, flush=True)
        leave_code(self.run_dir, EXIT_SILENT)
        if not self._orphaned():
            self.evidence.conclude(reason, self.step)
            text = (
                f"rank {self.rank}: distlab hang {self.run_dir} shows where each rank was; if they "
                f"were only slow, raise heartbeat_timeout_s, {self.timeout_s:g} now"
            )
            print(text, file=sys.stderr, flush=True)
        end_process(EXIT_SILENT)  # an exception would not reach a main thread in a collective


def end_process(code: int) -> NoReturn:
    """End this process and the loader's workers at once, whatever its threads do."""
    try:
        sys.stdout.flush()
        _end_workers()
    finally:
        os._exit(code)


def _end_workers() -> None:
    """Kill the loader's workers, because a worker that hangs while it starts would never end.

    Multiprocessing's resource tracker is spared: it must still remove the workers' semaphores, and
    then ends by itself.
    """
    for worker in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in worker.cmdline()):
                worker.kill()


def _store(timeout_s: float) -> Any:
    """Return a store hosted by rank 0; its operations time out after ``timeout_s``."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    is_host = dist.get_rank() == 0
    timeout = timedelta(seconds=max(timeout_s, 5.0))
    mine = (
        TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        if is_host
        else None
    )
    port = [mine.port if mine else 0]
    dist.broadcast_object_list(port, src=0)
    return mine or TCPStore(host, port[0], wait_for_workers=False, timeout=timeout)
