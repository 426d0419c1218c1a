"""How long ranks may take to start, and what a person at the terminal sees meanwhile."""

import os
import sys
import time

QUIET_S = 1.0  # a world that is up sooner needs no words
REDRAW_S = 0.2
MAX_PER_CORE = 4
TIMEOUT_S = 120.0  # for all ranks to join the process group
# For each rank beyond MAX_PER_CORE of a core: ten times what 200 ranks took on two busy cores.
MORE_S = 2.0


def timeout_s(world_size: int, num_cores: int) -> float:
    """Return how long ranks may take to join the process group: longer if many share a core."""
    return TIMEOUT_S + MORE_S * max(0.0, world_size / num_cores - MAX_PER_CORE)


def explained(world_size: int, num_cores: int) -> str:
    """Say how ``timeout_s`` comes about, and what to do."""
    return (
        f"All ranks must have started within {TIMEOUT_S:g} s, and {MORE_S:g} s more for each rank "
        f"beyond {MAX_PER_CORE} of a core. {crowd(world_size, num_cores)}"
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


class Display:
    """One line on the terminal: how many ranks have joined; erased when all have."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._is_on = sys.stderr is not None and sys.stderr.isatty()
        self._next_draw = time.monotonic() + QUIET_S
        self._has_drawn = False
        if self._is_on and (warning := crowd(world_size, num_cores())):
            self._write(f"{warning}\n")

    def show(self, num_forked: int, num_joined: int) -> None:
        """Draw the state anew, a few times a second at most."""
        now = time.monotonic()
        if not self._is_on or now < self._next_draw:
            return
        self._next_draw, self._has_drawn = now + REDRAW_S, True
        self._write(
            f"\r\x1b[Kstarting {self._world_size} ranks: {num_forked} have a process, "
            f"{num_joined} have joined the group"
        )

    def close(self) -> None:
        """Erase the line; nothing is shown any more."""
        if self._has_drawn:
            self._write("\r\x1b[K")
        self._is_on = self._has_drawn = False

    def _write(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)
