"""Fault tolerance: notice that a rank is gone, and go on without it."""

import math
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from phase4_production.given import EXIT_STOPPED, Group, group_device


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
        """Catch the signals from now on. A caught one is only noted: the step goes on."""
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
            self.received = True  # and never back: a signal may have come meanwhile
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
        save_s: how long training stands still for one checkpoint; above 0.
        node_mtbf_s: mean time between the failures of one node; above 0.
        num_nodes: that the job needs at the same time: one that fails stops it. At least 1.

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
        save_s: how long training stands still for one checkpoint; above 0.
        node_mtbf_s: mean time between the failures of one node; above 0.
        num_nodes: that the job needs at the same time: one that fails stops it. At least 1.

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
    hit a save or a restart too. After a failure comes a restart, and then the interval begins anew.
    With M for the mean time between the failures of the job, R for the restart, τ for the interval
    and δ for the save, work of T seconds takes on average
        M · e^(R/M) · (e^((τ+δ)/M) − 1) · T/τ
    A day of training on 1,000 nodes that fail once in 30 days each, with a save of 60 s, a restart
    of 300 s and an interval of 518 s: 33.7 hours.

    Args:
        work_s: how long the run takes without saves and failures.
        interval_s: of training between two saves; above 0.
        save_s: how long training stands still for one checkpoint; at least 0.
        restart_s: from a failure until training goes on; at least 0.
        node_mtbf_s: mean time between the failures of one node; above 0.
        num_nodes: that the job needs at the same time: one that fails stops it. At least 1.

    Returns:
        Seconds.

    Source: Daly 2006 (FGCS 22), equation 13.
    """
    mtbf_s = node_mtbf_s / num_nodes
    attempt_s = mtbf_s * math.expm1((interval_s + save_s) / mtbf_s)
    return attempt_s * math.exp(restart_s / mtbf_s) * work_s / interval_s
