"""Limits on a submission's wall-clock time, processor time and idle time.

A limit must end a hang soon, but never a correct answer, even on a slow machine. Exceeding a limit
is therefore only grounds for suspicion: a world counts as hung only if the reference, run right
afterwards, does the same work in much less time. In a copy of the course without solutions, a
computation that usually takes a known time stands in for the reference.
"""

import torch

from distlab.launch import Limits
from distlab.launch.limits import Used

MEMORY_LIMIT_BYTES = 2 * 2**30
COMPUTING_SHARE = 0.2  # limit on processor time / wall-clock limit; solutions use 1/20 of it
IDLE_SHARE = 0.2  # share of the wall-clock limit after which idle ranks count as deadlocked
REFERENCE_TIMEOUT_S = 120.0  # a machine on which the reference takes longer is too slow
TIMES_THE_REFERENCE = 10  # a correct answer may be this many times as slow as the reference
# Wall-clock time and processor time of ``work`` on two idle cores of a 2024 machine.
USUAL_S = 0.1


def work() -> None:
    """Compute for about ``USUAL_S`` on a machine of normal speed."""
    x = torch.zeros(10)
    for _ in range(40_000):
        x = x + 1


def limits_of(timeout_s: float) -> Limits:
    """Return all limits of a world, derived from its wall-clock limit."""
    return _limits(timeout_s, COMPUTING_SHARE * timeout_s, IDLE_SHARE * timeout_s)


def raised_to(limits: Limits, used: Used) -> Limits | None:
    """Raise limits to 10 times what the reference used; return None if they are already as high.

    The idle limit is raised to twice the reference's wall-clock time.
    """
    timeout_s, cpu_s, idle_s = _seconds(limits)
    raised = _limits(
        max(timeout_s, TIMES_THE_REFERENCE * used.wall_s),
        max(cpu_s, TIMES_THE_REFERENCE * used.cpu_s),
        max(idle_s, 2 * used.wall_s),
    )
    return None if raised == limits else raised


def scaled_by(limits: Limits, used: Used) -> Limits | None:
    """Scale limits to a machine where ``work`` took ``used``; return None if it is not slow."""
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
