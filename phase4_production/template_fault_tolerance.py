"""Fault tolerance: notice that a rank is gone, and go on without it.

Tasks 4.5 to 4.8. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 4.5``.
"""

import math


# anchor 4.5
# end 4.5


# anchor 4.6
# end 4.6


# anchor 4.7
# end 4.7


# anchor 4.8
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
    # TODO 4.8: return Young's interval.
    #   Tools: math.sqrt.
    #   Example: a save of 2 s and one node that fails every 100 s: 20 s.
    #   About 1 line.
    raise NotImplementedError("Task 4.8: young_interval_s, see guidelines.md#48-how-often-to-save")


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
    # TODO 4.8: return Daly's interval.
    #   Tools: math.sqrt, young_interval_s.
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
    # TODO 4.8: return the expected duration.
    #   Tools: math.exp, math.expm1.
    #   Example: 1000 s of work, intervals of 20 s, a save of 2 s, a restart of 10 s, and one node
    #   that fails every 100 s: 1360 s.
    #   About 3 lines.
    raise NotImplementedError(
        "Task 4.8: expected_duration_s, see guidelines.md#48-how-often-to-save"
    )


# end 4.8
