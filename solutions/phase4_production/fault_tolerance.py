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
    """Reports that a rank is alive, and how far it has got."""

    def __init__(self, store: Store, rank: int) -> None:
        """Store the arguments; nothing is reported yet.

        Args:
            store: store that all ranks and the monitor can reach, such as a ``dist.TCPStore``.
            rank: rank that reports.
        """
        self.store, self.key, self.count = store, _key_of(rank), 0

    def beat(self, step: int, busy_s: float) -> None:
        """Report that this rank has done its own part of a step, and now waits for the others.

        This may also be called during a long step, even several times, to show that the rank is
        alive.

        Args:
            step: training step.
            busy_s: time that the rank has worked on the step, without waiting for others.

        Cost: one message to the store, which waits for no other rank.
        """
        self.count += 1  # so that no two reports are equal
        self.store.set(self.key, f"{self.count} {step} {busy_s}")


def _key_of(rank: int) -> str:
    """Return the key under which a rank reports."""
    return f"heartbeat/{rank}"


@dataclass
class _Seen:
    """A monitor's record of a rank."""

    seen_s: float
    report: bytes = b""
    step: int = -1
    busy_s: float = 0.0
    slow_reports: int = 0  # consecutive reports in which it was slow


class HeartbeatMonitor:
    """Finds out which ranks are alive, waiting, slow or gone.

    For example, rank 1 of three is killed in step 5. The others wait for it in the all-reduce of
    step 5, so no rank reports any more; but the last report of rank 1 has a lower step than theirs:
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
        """Start watching.

        Args:
            store: store to which the ranks report.
            world_size: number of ranks.
            timeout_s: time without a report after which a rank is ``silent`` or ``waiting``; longer
                than the longest step.
            slow_factor: multiple of the median ``busy_s`` above which a report is slow.
            patience: number of consecutive slow reports that make a rank ``slow``.
            clock: function that returns the time on this host, in seconds. The clocks of other
                hosts may be ahead or behind, so times are never sent.
        """
        self.store, self.timeout_s, self.clock = store, timeout_s, clock
        self.slow_factor, self.patience = slow_factor, patience
        begun_s = clock()
        self.ranks = [_Seen(begun_s) for _ in range(world_size)]

    def poll(self) -> list[Health]:
        """Look at the newest report of each rank, and judge the ranks.

        Returns:
            The health of each rank, in rank order. ``step`` is that of its last report, -1 before
            the first. ``silent_s`` is the time on ``clock`` since the poll that first saw this
            report; before the first report, since the monitor was created.

            status      condition; the first that holds decides
            silent      silent_s is above timeout_s, and no rank has a lower step
            waiting     silent_s is above timeout_s, and some rank has a lower step
            slow        the last ``patience`` reports of the rank that polls have seen were slow
            alive       otherwise; a rank that was silent is alive again as soon as it reports

            A report is judged once, in the poll that first sees it, after that poll has read the
            reports of all ranks. It is slow if its busy_s is above slow_factor times the median of
            the ranks' newest reports (of two in the middle, the lower one). Ranks that have not
            reported yet do not count.

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
        """Read the newest report of a rank; return whether it is new."""
        key = _key_of(rank)
        report = self.store.get(key) if self.store.check([key]) else b""  # get alone would wait
        if report == seen.report:
            return False
        _, step, busy_s = report.split()
        seen.report, seen.seen_s = report, now_s
        seen.step, seen.busy_s = int(step), float(busy_s)
        return True

    def _judge_speed(self, new: Sequence[_Seen]) -> None:
        """Update the counts of consecutive slow reports, for ranks with a new report."""
        times_s = [seen.busy_s for seen in self.ranks if seen.report]
        for seen in new:
            is_slow = seen.busy_s > self.slow_factor * median_low(times_s)
            seen.slow_reports = seen.slow_reports + 1 if is_slow else 0

    def _status(self, seen: _Seen, now_s: float, lowest: int) -> Status:
        """Return the status of a rank."""
        if now_s - seen.seen_s > self.timeout_s:
            return "silent" if seen.step == lowest else "waiting"
        return "slow" if seen.slow_reports >= self.patience else "alive"


class StopRequest:
    """Stops all ranks after the same step when one of them is asked to stop.

    A cluster sends SIGTERM half a minute or so before it takes a node away. The signal may reach
    the ranks at different times, or only some of them. In this example, it reaches only rank 1 of
    three, in step 4:
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
        """Store the arguments; no signal is caught yet.

        Args:
            signals: signals that ask to stop.
            group: the ranks that stop together; all ranks by default.
        """
        self.signals, self.group = signals, group
        self.received = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        """Catch the signals from now on; a caught signal is only noted, and the step continues."""
        self.handlers = {number: signal.signal(number, self._note) for number in self.signals}
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the previous handlers of the signals."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note that a signal has arrived."""
        self.received = True

    def agreed(self) -> bool:
        """Return whether any rank has been asked to stop; the answer is the same on all ranks.

        All ranks of the group call this after every step. A signal that arrives during the call
        counts now or in the next step. Once the answer is true, it stays true.

        Cost: one all-reduce of at most 8 bytes. On NCCL, the answer must be read from the GPU, so
            the host also waits for all kernels that it has started.
        """
        received = torch.full((), int(self.received), device=group_device(self.group))
        dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
        is_agreed = bool(received)  # the only wait for a GPU
        if is_agreed:
            self.received = True  # never reset: a signal may have arrived meanwhile
        return is_agreed

    def leave(self, save: Callable[[], object]) -> NoReturn:
        """Save, wait until every rank has saved, and exit; all ranks of the group call this.

        If a rank exited before the others had saved, torchrun would end those too.

        Args:
            save: function that saves; called once. Another signal does not interrupt it.

        Raises:
            SystemExit: with EXIT_STOPPED, which is 75: nothing has failed, so run it again. If
                ``save`` raises an error, this error propagates instead.
        """
        save()
        dist.barrier(self.group)
        raise SystemExit(EXIT_STOPPED)


def young_interval_s(save_s: float, node_mtbf_s: float, num_nodes: int = 1) -> float:
    """Return how long to train between two checkpoints, by the simplest estimate.

    A failure costs half an interval on average, so long intervals lose work, while short ones lose
    time in saves. If a save takes 60 s and a node fails once in 30 days, then 1,000 nodes fail once
    in 2,592 s, and the interval is √(2 · 60 · 2592) = 558 s.

    Args:
        save_s: time for which one checkpoint stops training; above 0.
        node_mtbf_s: mean time between failures of one node; above 0.
        num_nodes: number of nodes of the job, at least 1; the failure of any node stops it.

    Returns:
        Seconds of training, without the save.

    Source: Young 1974 (CACM).
    """
    return math.sqrt(2 * save_s * node_mtbf_s / num_nodes)


def daly_interval_s(save_s: float, node_mtbf_s: float, num_nodes: int = 1) -> float:
    """Return how long to train between two checkpoints, even if failures are frequent.

    With δ for the save time and M for the job's mean time between failures:
        √(2δM) · (1 + ⅓ √(δ / 2M) + ⅑ · δ / 2M) − δ    if δ < 2M
        M                                               otherwise
    For δ = 60 s, the result is 518 s if M = 2592 s (where Young's estimate is 558 s), and 49.6 s if
    M = 60 s (where Young's estimate is 84.9 s).

    Args:
        save_s: time for which one checkpoint stops training; above 0.
        node_mtbf_s: mean time between failures of one node; above 0.
        num_nodes: number of nodes of the job, at least 1; the failure of any node stops it.

    Returns:
        Seconds of training, without the save.

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
    """Return how long a training run takes on average, with saves, failures and restarts.

    Work is done in intervals, each of which ends with a save. Failures occur at a constant rate,
    even during saves and restarts. Each failure is followed by a restart, and then the interval
    starts over. The number of intervals, work_s / interval_s, need not be whole. The guidelines
    lead to the formula.

    For example, 1,000 s of work in intervals of 20 s, with a save of 2 s and a failure every 100 s
    on average, takes 1,230 s if a restart takes no time, and 1,360 s if it takes 10 s. A day of
    training on 1,000 nodes that fail once in 30 days each, with a save of 60 s, a restart of 300 s
    and an interval of 518 s, takes 33.7 hours.

    Args:
        work_s: duration of the run without saves and failures.
        interval_s: training time between two saves; above 0.
        save_s: time for which one checkpoint stops training; at least 0.
        restart_s: time from a failure until training continues; at least 0.
        node_mtbf_s: mean time between failures of one node; above 0.
        num_nodes: number of nodes of the job, at least 1; the failure of any node stops it.

    Returns:
        Seconds.

    Source: Daly 2006 (FGCS 22), equation 13.
    """
    mtbf_s = node_mtbf_s / num_nodes
    attempt_s = mtbf_s * math.expm1((interval_s + save_s) / mtbf_s)
    return attempt_s * math.exp(restart_s / mtbf_s) * work_s / interval_s
