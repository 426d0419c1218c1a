"""Limits of a world and of its start, and a meter of its use of time.

with metered() as used:
    launch.run(fn, 4)
used.cpu_s     # processor time of the rank that has computed most
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from distlab.launch.errors import SetupError

FOREVER_S = 20 * 24 * 3600.0  # clocks can count to it; torch's own limit of a collective is 30 min


@dataclass(frozen=True)
class Limits:
    """Limits of a world, from the moment all its ranks are up.

        launch.run(fn, 4, limits=Limits(timeout_s=60, cpu_s=10))

    Args:
        timeout_s: Seconds by the clock; None or inf waits forever.
        cpu_s: Processor time of each process. It finds an endless loop before ``timeout_s`` does,
            which also counts the time that a busy machine takes; with it, a process that waits
            for a processor when ``timeout_s`` is over may continue. None: no limit.
        idle_s: Seconds in which no rank computes, not even its share of a collective. It finds
            ranks that wait for each other before ``timeout_s`` does; None: no limit.
        memory_bytes: Memory that all ranks together may allocate, without the processes that they
            start; None: 90 % of the free memory.

    Raises:
        SetupError: One of them is not positive.
    """

    timeout_s: float | None = 300.0
    cpu_s: float | None = None
    idle_s: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_positive = isinstance(value, Real) and float(value) > 0
            if value is not None and not is_positive:
                raise SetupError(f"{name} must be positive or None, got {value!r}")

    @property
    def finite_timeout_s(self) -> float | None:
        """``timeout_s``, or None if no clock counts that far."""
        is_finite = self.timeout_s is not None and self.timeout_s < FOREVER_S
        return self.timeout_s if is_finite else None


@dataclass(frozen=True)
class Exceeded:
    """The limit that ended a world: ``str()`` is "2 s of computing"."""

    limit: Literal["start", "time", "computing", "idle"]
    seconds: float

    def __str__(self) -> str:
        suffixes = {
            "start": " to start",
            "time": "",
            "computing": " of computing",
            "idle": " in which no rank computed",
        }
        return f"{self.seconds:g} s{suffixes[self.limit]}"


@dataclass
class Used:
    """The largest use of time by a world inside a ``metered`` block.

    Attributes:
        cpu_s: Processor time of the process that has computed most, after all ranks were up.
        wall_s: Seconds from then until the last rank had reported.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0


_current: contextvars.ContextVar[Used | None] = contextvars.ContextVar("used", default=None)


@contextlib.contextmanager
def metered() -> Iterator[Used]:
    """Record the use of time of every world that is run inside the block."""
    used = Used()
    token = _current.set(used)
    try:
        yield used
    finally:
        _current.reset(token)


def note_use(cpu_s: float, wall_s: float) -> None:
    """Record the use of time of one world, inside a ``metered`` block."""
    used = _current.get()
    if used is not None:
        used.cpu_s, used.wall_s = max(used.cpu_s, cpu_s), max(used.wall_s, wall_s)


MAX_PER_CORE = 4
START_TIMEOUT_S = 120.0  # time for all ranks to join the process group
# For each rank beyond MAX_PER_CORE of a core: ten times what 200 ranks took on two busy cores.
START_MORE_S = 2.0


def start_timeout_s(world_size: int, num_cores: int) -> float:
    """Return how long ranks may take to join the process group: longer if many share a core."""
    return START_TIMEOUT_S + START_MORE_S * max(0.0, world_size / num_cores - MAX_PER_CORE)


def start_explained(world_size: int, num_cores: int) -> str:
    """Return an explanation of ``start_timeout_s``, and advice."""
    return (
        f"All ranks must have started within {START_TIMEOUT_S:g} s, and {START_MORE_S:g} s more "
        f"for each rank beyond {MAX_PER_CORE} of a core. {crowd(world_size, num_cores)}"
    ).rstrip()


def crowd(world_size: int, num_cores: int) -> str:
    """Return a warning if there are many ranks for each core, "" if not."""
    if world_size <= MAX_PER_CORE * num_cores:
        return ""
    cores = f"{num_cores} core" + "s" * (num_cores != 1)
    return (
        f"{world_size} workers share {cores}, more than {MAX_PER_CORE} a core: they start slowly "
        f"and wait for each other. Use at most {MAX_PER_CORE * num_cores}, or backend sim"
    )


def num_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1
