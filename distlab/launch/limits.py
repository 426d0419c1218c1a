"""Limits on a world and its start-up, and a meter for the time that a world uses.

with metered() as used:
    launch.run(fn, 4)
used.cpu_s     # processor time of the rank that computed most
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from distlab.launch.errors import SetupError

FOREVER_S = 20 * 24 * 3600.0  # used for "no timeout", because torch's default is 30 min


@dataclass(frozen=True)
class Limits:
    """Limits on a world, in force from the moment all its ranks are up.

        launch.run(fn, 4, limits=Limits(timeout_s=60, cpu_s=10))

    Args:
        timeout_s: Wall-clock seconds; None or inf means no limit.
        cpu_s: Processor time of each process. This limit catches an endless loop sooner than
            ``timeout_s``, which must allow for the delays of a busy machine. With ``cpu_s``, a
            process that is waiting for a processor when ``timeout_s`` expires may continue. None
            means no limit.
        idle_s: Seconds during which no rank computes, not even its part of a collective. This limit
            catches ranks that wait for each other sooner than ``timeout_s``. None means no limit.
        memory_bytes: Memory that all ranks together may allocate, not counting the processes that
            they start. None means 90 % of the free memory.

    Raises:
        SetupError: A limit is not positive.
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
        """``timeout_s``, or None if it is None, infinite or too long for a clock."""
        is_finite = self.timeout_s is not None and self.timeout_s < FOREVER_S
        return self.timeout_s if is_finite else None


@dataclass(frozen=True)
class Exceeded:
    """The limit that ended a world; ``str()`` returns text such as "2 s of computing"."""

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
    """The longest times that any world used inside a ``metered`` block.

    Attributes:
        cpu_s: Processor time that the busiest process has used since all ranks were up.
        wall_s: Seconds from the moment all ranks were up until the last rank had reported.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0


_current: contextvars.ContextVar[Used | None] = contextvars.ContextVar("used", default=None)


@contextlib.contextmanager
def metered() -> Iterator[Used]:
    """Yield a record of the longest times used by any world that is run inside the block."""
    used = Used()
    token = _current.set(used)
    try:
        yield used
    finally:
        _current.reset(token)


def note_use(cpu_s: float, wall_s: float) -> None:
    """Record the time that one world used, if this is called inside a ``metered`` block."""
    used = _current.get()
    if used is not None:
        used.cpu_s, used.wall_s = max(used.cpu_s, cpu_s), max(used.wall_s, wall_s)


MAX_PER_CORE = 4
START_TIMEOUT_S = 120.0  # time for all ranks to join the process group
# Added for each rank per core beyond MAX_PER_CORE: ten times what 200 ranks took on two busy cores.
START_MORE_S = 2.0


def start_timeout_s(world_size: int, num_cores: int) -> float:
    """Return how long ranks may take to join the process group; longer if many share a core."""
    return START_TIMEOUT_S + START_MORE_S * max(0.0, world_size / num_cores - MAX_PER_CORE)


def start_explained(world_size: int, num_cores: int) -> str:
    """Return a message that explains ``start_timeout_s`` and gives advice."""
    return (
        f"All ranks must have started within {START_TIMEOUT_S:g} s, and {START_MORE_S:g} s more "
        f"for each rank beyond {MAX_PER_CORE} of a core. {crowd(world_size, num_cores)}"
    ).rstrip()


def crowd(world_size: int, num_cores: int) -> str:
    """Return a warning if too many ranks share each core, else ""."""
    if world_size <= MAX_PER_CORE * num_cores:
        return ""
    cores = f"{num_cores} core" + "s" * (num_cores != 1)
    return (
        f"{world_size} workers share {cores}, more than {MAX_PER_CORE} a core: they start slowly "
        f"and wait for each other. Use at most {MAX_PER_CORE * num_cores}, or backend sim"
    )


def num_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # exists only on Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
