"""Fault tolerance: notice that a rank is gone, and continue without it."""

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from phase4_production.given import EXIT_STOPPED, Group, Health, Status, Store, group_device


class Heartbeat:
    """Reports that a rank lives, and how far it is."""

    def __init__(self, store: Store, rank: int) -> None:
        """Prepare; nothing is reported yet.

        Args:
            store: store that all ranks and the monitor reach, such as a ``dist.TCPStore``.
            rank: rank that reports.
        """
        self.store, self.key, self.count = store, _key_of(rank), 0

    def beat(self, step: int, busy_s: float) -> None:
        """Report that this rank has done its own part of a step, and now waits for the others.

        It may be called several times for a step that takes long, to show that the rank lives.

        Args:
            step: step of the training.
            busy_s: how long the rank has worked in it: without waiting for others.

        Cost: one message to the store, which waits for no other rank.
        """
        self.count += 1  # no two reports are equal
        self.store.set(self.key, f"{self.count} {step} {busy_s}")


def _key_of(rank: int) -> str:
    """Return where a rank reports."""
    return f"heartbeat/{rank}"


@dataclass
class _Seen:
    """What a monitor has seen of a rank."""

    seen_s: float
    report: bytes = b""
    step: int = -1
    busy_s: float = 0.0
    slow_reports: int = 0  # consecutive reports in which it was slow


class HeartbeatMonitor:
    """Tells which ranks live, wait, are slow or are gone.

    Three ranks; rank 1 is killed in step 5. The others wait for it in the all-reduce of step 5, so
    that nobody reports any more; but the step of its last report is lower than theirs:
        rank 0    step 3   step 4   step 5   …    waiting
        rank 1    step 3   step 4                 silent
        rank 2    step 3   step 4   step 5   …    waiting
    """

    def __init__(
        self,
        store: Store,
        world_size: int,
        *,
        timeout_s: float,
        slow_factor: float = 2.0,
        patience: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch.

        Args:
            store: store that the ranks report to.
            world_size: how many ranks there are.
            timeout_s: a rank that has not reported for longer is ``silent`` or ``waiting``. Above
                the time of the longest step.
            slow_factor: a rank is slow if its ``busy_s`` is above this many times the median.
            patience: number of reports in a row in which it must be slow.
            clock: returns the time of this process, in seconds. The clocks of other hosts may be
                ahead or behind: times are never sent.
        """
        self.store, self.timeout_s, self.clock = store, timeout_s, clock
        self.slow_factor, self.patience = slow_factor, patience
        begun_s = clock()
        self.ranks = [_Seen(begun_s) for _ in range(world_size)]

    def poll(self) -> list[Health]:
        """Look at the newest report of each rank.

        Returns:
            What is known of each rank, rank by rank. ``step`` is that of its last report, -1 before
            the first, and ``silent_s`` the time on ``clock`` since the poll that has seen it first;
            before the first, since the monitor has begun.

            status      when; the first that fits
            silent      silent_s is above timeout_s, and the step of no rank is lower
            waiting     silent_s is above timeout_s, and the step of a rank is lower
            slow        the last ``patience`` reports that were seen were slow, one after the other:
                        each time busy_s was above slow_factor times the median of the newest
                        reports of all ranks; of two in the middle, the lower one
            alive       otherwise: also again, as soon as a rank that was silent reports

        Cost: at most two messages to the store for each rank; it never waits for a rank.
        """
        now_s = self.clock()
        new = [seen for rank, seen in enumerate(self.ranks) if self._is_new(rank, seen, now_s)]
        self._judge_speed(new)
        lowest = min(seen.step for seen in self.ranks)
        return [
            Health(rank, seen.step, now_s - seen.seen_s, self._status(seen, now_s, lowest))
            for rank, seen in enumerate(self.ranks)
        ]

    def _is_new(self, rank: int, seen: _Seen, now_s: float) -> bool:
        """Read the newest report of a rank, if there is one that was not seen before."""
        key = _key_of(rank)
        report = self.store.get(key) if self.store.check([key]) else b""  # get alone would wait
        if report == seen.report:
            return False
        _, step, busy_s = report.split()
        seen.report, seen.seen_s = report, now_s
        seen.step, seen.busy_s = int(step), float(busy_s)
        return True

    def _judge_speed(self, new: Sequence[_Seen]) -> None:
        """Count the slow reports in a row of those ranks that have reported."""
        times_s = [seen.busy_s for seen in self.ranks if seen.report]
        for seen in new:
            is_slow = seen.busy_s > self.slow_factor * median_low(times_s)
            seen.slow_reports = seen.slow_reports + 1 if is_slow else 0

    def _status(self, seen: _Seen, now_s: float, lowest: int) -> Status:
        """Tell what a rank does, as far as one can see."""
        if now_s - seen.seen_s > self.timeout_s:
            return "silent" if seen.step == lowest else "waiting"
        return "slow" if seen.slow_reports >= self.patience else "alive"


class StopRequest:
    """Lets all ranks stop after the same step when one of them is asked to.

    A cluster sends SIGTERM before it takes a node away, and waits for half a minute or so. It may
    reach the ranks at different times, or some of them only; rank 1 of three, in step 4:
        rank 0    step 3   step 4             False -> agreed: True    saves, waits, exits with 75
        rank 1    step 3   step 4   SIGTERM   True  -> agreed: True    saves, waits, exits with 75
        rank 2    step 3   step 4             False -> agreed: True    saves, waits, exits with 75

        with StopRequest() as stop:
            for step in range(num_steps):
                train(step)
                if stop.agreed():
                    stop.leave(lambda: save_checkpoint(state, folder, step))
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        group: Group = None,
    ) -> None:
        """Prepare; no signal is caught yet.

        Args:
            signals: each of them asks to stop.
            group: the ranks that stop together; all ranks by default.
        """
        self.signals, self.group = signals, group
        self.received = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        """Catch the signals from now on. A caught one is only noted: the step continues."""
        self.handlers = {number: signal.signal(number, self._note) for number in self.signals}
        return self

    def __exit__(self, *error: object) -> None:
        """Handle the signals again as before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note that a signal has come."""
        self.received = True

    def agreed(self) -> bool:
        """Tell whether any rank has been asked to stop: the same answer on all ranks.

        All ranks of the group call it after every step. A signal that comes while they do counts
        now or in the next step. Once the answer is true, it stays so.

        Cost: one all-reduce of at most 8 bytes.
        """
        received = torch.tensor(int(self.received), device=group_device(self.group))
        dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
        if received:
            self.received = True  # never reset: a signal may have come meanwhile
        return bool(received)

    def leave(self, save: Callable[[], object]) -> NoReturn:
        """Save, wait until every rank has saved, and exit: all ranks of the group call it.

        A rank that exits early would take the others with it: torchrun ends them all.

        Args:
            save: called once. Another signal does not interrupt it.

        Raises:
            SystemExit: always, with EXIT_STOPPED, which is 75: not failed, but to be run again.
        """
        save()
        dist.barrier(self.group)
        raise SystemExit(EXIT_STOPPED)


def young_interval_s(save_s: float, node_mtbf_s: float, num_nodes: int = 1) -> float:
    """Tell how long to train between two checkpoints: the simplest estimate.

    A failure costs half an interval on average, so that long intervals lose work; short ones lose
    the time of the saves. With a save of 60 s and a node that fails once in 30 days, 1,000 nodes
    fail once in 2,592 s, and √(2 · 60 · 2592) = 558 s.

    Args:
        save_s: time that one checkpoint stops training for; above 0.
        node_mtbf_s: mean time between the failures of one node; above 0.
        num_nodes: nodes that the job runs on, at least 1; any node that fails stops it.

    Returns:
        Seconds of training, the save not included.

    Source: Young 1974 (CACM).
    """
    return math.sqrt(2 * save_s * node_mtbf_s / num_nodes)


def daly_interval_s(save_s: float, node_mtbf_s: float, num_nodes: int = 1) -> float:
    """Tell how long to train between two checkpoints, also where failures are frequent.

    With δ for the save and M for the mean time between the failures of the job:
        √(2δM) · (1 + ⅓ √(δ / 2M) + ⅑ · δ / 2M) − δ    if δ < 2M
        M                                               otherwise
    δ = 60 s: 518 s for M = 2592 s, where Young's is 558 s; 49.6 s for M = 60 s, where it is
    84.9 s.

    Args:
        save_s: time that one checkpoint stops training for; above 0.
        node_mtbf_s: mean time between the failures of one node; above 0.
        num_nodes: nodes that the job runs on, at least 1; any node that fails stops it.

    Returns:
        Seconds of training, the save not included.

    Source: Daly 2006 (FGCS 22), equation 37.
    """
    mtbf_s = node_mtbf_s / num_nodes
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    young_s = young_interval_s(save_s, node_mtbf_s, num_nodes)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_duration_s(
    work_s: float,
    interval_s: float,
    save_s: float,
    restart_s: float,
    node_mtbf_s: float,
    num_nodes: int = 1,
) -> float:
    """Tell how long a training run takes on average, with its saves, failures and restarts.

    Work is done in intervals, and each ends with a save. Failures come at a constant rate, and may
    hit a save or a restart too. After a failure comes a restart, and then the interval starts over.
    With M for the mean time between the failures of the job, R for the restart, τ for the interval
    and δ for the save, work of T seconds takes on average
        M · e^(R/M) · (e^((τ+δ)/M) − 1) · T/τ
    A day of training on 1,000 nodes that fail once in 30 days each, with a save of 60 s, a restart
    of 300 s and an interval of 518 s: 33.7 hours.

    Args:
        work_s: how long the run takes without saves and failures.
        interval_s: training time between two saves; above 0.
        save_s: time that one checkpoint stops training for; at least 0.
        restart_s: time from a failure until training continues; at least 0.
        node_mtbf_s: mean time between the failures of one node; above 0.
        num_nodes: nodes that the job runs on, at least 1; any node that fails stops it.

    Returns:
        Seconds.

    Source: Daly 2006 (FGCS 22), equation 13.
    """
    mtbf_s = node_mtbf_s / num_nodes
    attempt_s = mtbf_s * math.expm1((interval_s + save_s) / mtbf_s)
    return attempt_s * math.exp(restart_s / mtbf_s) * work_s / interval_s
