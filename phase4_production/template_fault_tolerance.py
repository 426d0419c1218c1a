"""Fault tolerance: notice that a rank is gone, and continue without it.

Tasks 4.5, 4.7 and 4.8. The docstring says what a function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade one task: ``distlab check 4.5``.
"""

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
        # TODO 4.5: keep the store and where this rank reports.
        #   Example: rank 3 may report under the key "heartbeat/3".
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.5: Heartbeat.__init__, see guidelines.md#45-notice-who-is-gone"
        )

    def beat(self, step: int, busy_s: float) -> None:
        """Report that this rank has done its own part of a step, and now waits for the others.

        This may also be called during a long step, even several times, to show that the rank is
        alive.

        Args:
            step: training step.
            busy_s: time that the rank has worked on the step, without waiting for others.

        Cost: one message to the store, which waits for no other rank.
        """
        # TODO 4.5: write the report into the store, such that no two reports are equal.
        #   Example: the 7th report, of step 6, after 0.25 s of work: "7 6 0.25".
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.5: Heartbeat.beat, see guidelines.md#45-notice-who-is-gone"
        )


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
        # TODO 4.5: keep the arguments, and for each rank when the monitor has begun.
        #   Example: 3 ranks, clock() is 100.0: each was seen at 100.0, with step -1.
        #   About 10 lines with the dataclass.
        raise NotImplementedError(
            "Task 4.5: HeartbeatMonitor.__init__, see guidelines.md#45-notice-who-is-gone"
        )

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
        # TODO 4.5: read what is new, count slow reports, and tell the status of each rank.
        #   Example: busy_s is 0.1, 0.1, 0.1 and 0.5 on 4 ranks: the median is 0.1, and 0.5 > 0.2.
        #   About 28 lines with helpers.
        raise NotImplementedError(
            "Task 4.5: HeartbeatMonitor.poll, see guidelines.md#45-notice-who-is-gone"
        )


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
        # TODO 4.7: keep the arguments, and that no signal has come.
        #   Example: StopRequest().agreed() is False on all ranks.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.7: StopRequest.__init__, see guidelines.md#47-stop-all-ranks-together"
        )

    def __enter__(self) -> "StopRequest":
        """Catch the signals from now on; a caught signal is only noted, and the step continues."""
        # TODO 4.7: catch the signals, and keep what handled them before; return self.
        #   Example: two signals are caught, so two handlers are kept.
        #   About 2 lines, and 2 for the handler.
        raise NotImplementedError(
            "Task 4.7: StopRequest.__enter__, see guidelines.md#47-stop-all-ranks-together"
        )

    def __exit__(self, *error: object) -> None:
        """Restore the previous handlers of the signals."""
        # TODO 4.7: put the handlers back.
        #   Example: after 2 signals were caught, 2 handlers are put back.
        #   About 2 lines.
        raise NotImplementedError(
            "Task 4.7: StopRequest.__exit__, see guidelines.md#47-stop-all-ranks-together"
        )

    def agreed(self) -> bool:
        """Return whether any rank has been asked to stop; the answer is the same on all ranks.

        All ranks of the group call this after every step. A signal that arrives during the call
        counts now or in the next step. Once the answer is true, it stays true.

        Cost: one all-reduce of at most 8 bytes. On NCCL, the answer must be read from the GPU, so
            the host also waits for all kernels that it has started.
        """
        # TODO 4.7: return whether a signal has come on any rank.
        #   Example: the ranks hold 0, 1 and 0: all get 1.
        #   About 4 lines.
        raise NotImplementedError(
            "Task 4.7: StopRequest.agreed, see guidelines.md#47-stop-all-ranks-together"
        )

    def leave(self, save: Callable[[], object]) -> NoReturn:
        """Save, wait until every rank has saved, and exit; all ranks of the group call this.

        If a rank exited before the others had saved, torchrun would end those too.

        Args:
            save: function that saves; called once. Another signal does not interrupt it.

        Raises:
            SystemExit: with EXIT_STOPPED, which is 75: nothing has failed, so run it again. If
                ``save`` raises an error, this error propagates instead.
        """
        # TODO 4.7: save, wait for all ranks, and exit.
        #   Example: rank 2 saves for 3 s, the others for 1 s: all exit after 3 s, with 75.
        #   About 3 lines.
        raise NotImplementedError(
            "Task 4.7: StopRequest.leave, see guidelines.md#47-stop-all-ranks-together"
        )


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
    # TODO 4.8: return Young's interval.
    #   Example: a save of 2 s and one node that fails every 100 s: 20 s.
    #   About 2 lines.
    raise NotImplementedError("Task 4.8: young_interval_s, see guidelines.md#48-how-often-to-save")


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
    # TODO 4.8: return Daly's interval.
    #   Example: a save of 2 s and one node that fails every 100 s: 18.69 s.
    #   About 6 lines.
    raise NotImplementedError("Task 4.8: daly_interval_s, see guidelines.md#48-how-often-to-save")


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
    # TODO 4.8: return the expected duration.
    #   Example: 1000 s of work, intervals of 20 s, a save of 2 s, a restart of 10 s, and one node
    #   that fails every 100 s: 1360 s.
    #   About 3 lines.
    raise NotImplementedError(
        "Task 4.8: expected_duration_s, see guidelines.md#48-how-often-to-save"
    )
