"""Limits of a submission's time: by the clock, in computing, in waiting.

A limit has to end a hang soon, but never a right answer, whose time depends on the machine.
Exceeding a limit therefore only raises a suspicion: whether the world really hangs depends on the
time of the reference for the same work at the same moment. In a copy of the course without
solutions, a piece of work with a known usual time replaces the reference.
"""

import torch

from distlab.launch import Limits
from distlab.launch.limits import Used

MEMORY_LIMIT_BYTES = 2 * 2**30
COMPUTING_SHARE = 0.2  # share of the clock limit; solutions compute a twentieth of that
IDLE_SHARE = 0.2  # share of the clock limit after which idle ranks must be in a deadlock
REFERENCE_TIMEOUT_S = 120.0  # longer means a machine that is too slow for the course
TIMES_THE_REFERENCE = 10  # a right answer may be much slower than the reference
# Time of ``work`` on two idle cores of 2024, by the clock and in computing.
USUAL_S = 0.1


def work() -> None:
    """Compute for about ``USUAL_S`` on a machine of usual speed."""
    x = torch.zeros(10)
    for _ in range(40_000):
        x = x + 1


def limits_of(timeout_s: float) -> Limits:
    """Return all limits of a world that follow from the one by the clock."""
    return _limits(timeout_s, COMPUTING_SHARE * timeout_s, IDLE_SHARE * timeout_s)


def raised_to(limits: Limits, used: Used) -> Limits | None:
    """Return limits with room for 10 times the reference's use, or None.

    None means that the given limits already have that room.
    """
    timeout_s, cpu_s, idle_s = _seconds(limits)
    raised = _limits(
        max(timeout_s, TIMES_THE_REFERENCE * used.wall_s),
        max(cpu_s, TIMES_THE_REFERENCE * used.cpu_s),
        max(idle_s, 2 * used.wall_s),
    )
    return None if raised == limits else raised


def scaled_by(limits: Limits, used: Used) -> Limits | None:
    """Return limits scaled to a machine on which ``work`` used this much; None if not larger."""
    timeout_s, cpu_s, idle_s = _seconds(limits)
    clock, computing = max(1.0, used.wall_s / USUAL_S), max(1.0, used.cpu_s / USUAL_S)
    if clock == computing == 1.0:
        return None
    return _limits(timeout_s * clock, cpu_s * computing, idle_s * clock)


def _limits(timeout_s: float, cpu_s: float, idle_s: float) -> Limits:
    return Limits(timeout_s, cpu_s, idle_s, MEMORY_LIMIT_BYTES)


def _seconds(limits: Limits) -> tuple[float, float, float]:
    """Return the three limits, which ``limits_of`` always sets."""
    return limits.timeout_s or 0.0, limits.cpu_s or 0.0, limits.idle_s or 0.0
