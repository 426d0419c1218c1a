"""How much worlds have used, for a caller that compares two of them.

with metered() as used:
    launch.run(fn, 4)
used.cpu_s     # of the rank that has computed most
"""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Used:
    """What the worlds inside a ``metered`` block have used, the largest of each.

    Attributes:
        cpu_s: processor time of the process that has computed most, after all ranks were up.
        wall_s: from then until the last rank had reported.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0


_current: contextvars.ContextVar[Used | None] = contextvars.ContextVar("used", default=None)


@contextlib.contextmanager
def metered() -> Iterator[Used]:
    """Note what every world that is run inside the block uses."""
    used = Used()
    token = _current.set(used)
    try:
        yield used
    finally:
        _current.reset(token)


def note(cpu_s: float, wall_s: float) -> None:
    """Note what one world has used, if somebody asked."""
    used = _current.get()
    if used is not None:
        used.cpu_s, used.wall_s = max(used.cpu_s, cpu_s), max(used.wall_s, wall_s)
