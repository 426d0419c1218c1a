"""A cell that real ranks run: show its output, notice who has failed, and interrupt the others."""

import pickle
import signal
import time
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from distlab.notebook import engine
from distlab.notebook.failing import Failure
from distlab.notebook.output import RankOutput
from distlab.notebook.processes import Processes

PERIOD_S = 0.1  # between two looks at the ranks
GRACE_S = 2.0  # for which the others go on after one rank has failed
DEADLOCK_S = 10.0  # for which all ranks wait for each other, idle, before they are interrupted
AGAIN_S = 1.0  # between two interrupts
MAX_INTERRUPTS = 3  # then the process is killed


class UnderWay:
    """A cell's calls.

    Args:
        calls: ipyparallel's results by rank.
        outputs: Outputs to fill.
        processes: Processes of all ranks.
        hang: Folder for the evidence of interrupted ranks.

    Attributes:
        failures: Errors of ranks that have ended.
        interrupted: Ranks that did not end by themselves.
        dead: Ranks whose process has ended.
        killed: Those of them that did not react to interrupts.
        has_left: True if a rank has left the process group.
        is_idle: True if ranks were interrupted because all waited for each other.
    """

    def __init__(
        self,
        calls: Mapping[int, Any],
        outputs: Mapping[int, RankOutput],
        processes: Processes,
        hang: Path,
    ) -> None:
        self._calls, self._outputs, self._processes = calls, outputs, processes
        self._hang = hang
        self._running = {*calls}
        self.failures: dict[int, Failure] = {}
        self.interrupted, self.dead, self.killed = set[int](), set[int](), set[int]()
        self.is_idle = False
        self.has_left = False
        self._next_s, self._num_interrupts = 0.0, 0
        self._ended_s = 0.0  # when the last rank has ended, which others may have waited for

    def finish(self) -> None:
        """Wait until the cell has ended on all ranks; Ctrl-C ends it."""
        while self._running:
            try:
                wait([self._calls[rank] for rank in self._running], PERIOD_S)
                self._look()
            except KeyboardInterrupt:
                self._stop(is_idle=False, after_s=0.0)

    @property
    def is_unusable(self) -> bool:
        """True if the process group may not work any more."""
        is_stopped = self.has_left or bool(self.interrupted or self.dead)
        return is_stopped or any(failure.is_of_torch for failure in self.failures.values())

    def death(self, rank: int) -> str:
        """Return the predicate of a sentence whose subject is a rank that is dead."""
        if rank in self.killed:
            return "did not react to interrupts: killed"
        killer = self._processes.killer(rank)
        return f"ended by {killer} in the cell" if killer else "ended in the cell"

    def _look(self) -> None:
        """Take what the ranks have sent, and interrupt those that can't end."""
        for rank in sorted(self._running):
            if self._calls[rank].done():
                self._end(rank)
            else:
                self._show(rank)
        self.dead |= self._processes.dead() & {*self._calls}
        self._running -= self.dead
        if self.failures or self.dead:
            self._stop(is_idle=False, after_s=GRACE_S)
        elif self._running and all(self._idle_s(rank) > DEADLOCK_S for rank in self._running):
            self._stop(is_idle=True, after_s=0.0)
        if self._running and self._next_s and time.monotonic() >= self._next_s:
            self._interrupt()

    def _end(self, rank: int) -> None:
        ended: engine.Ended = self._calls[rank].get()
        vars(self._outputs[rank]).update(vars(ended.output))
        self._running.remove(rank)
        self._ended_s = time.monotonic()
        self.has_left |= ended.has_left
        if ended.failure is not None:
            self.failures[rank] = ended.failure

    def _show(self, rank: int) -> None:
        if pickled := self._calls[rank].data.pop(engine.OUTPUT, None):
            vars(self._outputs[rank]).update(vars(pickle.loads(pickled)))

    def _idle_s(self, rank: int) -> float:
        """Return for how long a rank was idle when it last said so, since another has ended."""
        idle: tuple[float, float] = self._calls[rank].data.get(engine.IDLE, (0.0, 0.0))
        since_s, now_s = idle
        return now_s - max(since_s, self._ended_s)

    def _stop(self, *, is_idle: bool, after_s: float) -> None:
        """Interrupt the ranks after a time, or sooner if that was decided before."""
        if self._num_interrupts == 0:
            next_s = time.monotonic() + after_s
            self.is_idle = self.is_idle or is_idle
            self._next_s = min(self._next_s or next_s, next_s)

    def _interrupt(self) -> None:
        self._num_interrupts += 1
        self.interrupted |= self._running
        if self._num_interrupts > MAX_INTERRUPTS:
            self.killed |= self._running
            self._processes.signal(self._running, signal.SIGKILL)
            return
        self._processes.signal(self._running, signal.SIGINT)
        self._await_evidence()
        self._next_s = time.monotonic() + AGAIN_S

    def _await_evidence(self) -> None:
        """Let no rank end before all have written where they are."""
        end_s = time.monotonic() + engine.EVIDENCE_S
        while time.monotonic() < end_s:
            time.sleep(engine.TICK_S)
            if all((self._hang / f"rank{rank}.json").exists() for rank in self._running):
                break
        self._hang.mkdir(exist_ok=True)
        (self._hang / engine.COMPLETE).touch()
