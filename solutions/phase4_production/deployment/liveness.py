"""Checks whether the ranks of this container are still training: a probe for Kubernetes and Docker.

    python liveness.py RUN_DIR MAX_AGE_S             fails if a rank here has been silent too long
    python liveness.py RUN_DIR MAX_AGE_S --started   fails until each rank here has a heartbeat

A rank touches ``RUN_DIR/heartbeat.rank<r>`` once a second while it makes progress. An open port
would prove nothing: a rank that hangs in a collective keeps its ports open. All nodes share
RUN_DIR, and torchrun renumbers the ranks at each rendezvous, so the ranks here are found through
``/proc``.

A new rank has MAX_AGE_S seconds from its start, even if its predecessor has left an old heartbeat
behind. The probe also passes while no rank runs here: torchrun then waits for other nodes, for as
long as its own timeouts allow.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Rank(NamedTuple):
    """A rank that runs in this container."""

    number: int
    running_s: float  # age of its process
    silent_s: float  # age of its last heartbeat, which may come from an earlier process


def ranks_here(run_dir: Path) -> list[Rank]:
    """Return the ranks of a run that are on this machine, or in this container.

    Args:
        run_dir: folder that the trainer got as ``--run_dir``.
    """
    started_s: dict[int, float] = {}
    for number, seconds in _processes(str(run_dir)):  # DataLoader workers are younger
        started_s[number] = min(seconds, started_s.get(number, math.inf))
    return [
        Rank(number, _uptime_s() - seconds, _silent_s(run_dir / f"heartbeat.rank{number}"))
        for number, seconds in sorted(started_s.items())
    ]


def complaints(ranks: Sequence[Rank], max_age_s: float) -> list[str]:
    """Return one line for each rank that has been silent for too long."""
    return [
        f"rank {rank.number} has been silent for {min(rank.silent_s, rank.running_s):.0f} s, "
        f"{max_age_s:.0f} s are allowed"
        for rank in ranks
        if min(rank.silent_s, rank.running_s) > max_age_s
    ]


def not_started(ranks: Sequence[Rank]) -> list[str]:
    """Return one line for each rank without a heartbeat yet, or one line if no rank runs here."""
    waiting = [rank for rank in ranks if rank.silent_s >= rank.running_s]
    lines = [f"rank {r.number} has given no heartbeat in {r.running_s:.0f} s" for r in waiting]
    return lines if ranks else ["no rank runs here yet"]


def _processes(run_dir: str) -> Iterator[tuple[int, float]]:
    """Yield the rank and start time, in seconds after boot, of each of the run's processes here."""
    for folder in PROC.glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_text(errors="replace").split("\0")
            variables = (folder / "environ").read_text(errors="replace").split("\0")
            started = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[19]
        except OSError:  # the process has ended, or is another user's
            continue
        ranks = [text.removeprefix("RANK=") for text in variables if text.startswith("RANK=")]
        if ranks and ("--run_dir", run_dir) in pairwise(arguments):
            yield int(ranks[0]), int(started) / os.sysconf("SC_CLK_TCK")


def _uptime_s() -> float:
    """Return the seconds since the machine booted."""
    return float((PROC / "uptime").read_text().split()[0])


def _silent_s(heartbeat: Path) -> float:
    """Return the age of a heartbeat, infinite if there has been none."""
    try:
        return time.time() - heartbeat.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong; return the probe's exit code: 0 if nothing is wrong, otherwise 1."""
    parser = argparse.ArgumentParser(description="Do the ranks of this container still train?")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("max_age_s", type=float, help="above the longest evaluation and save")
    parser.add_argument("--started", action="store_true", help="whether each has given one yet")
    given = parser.parse_args(arguments)
    ranks = ranks_here(given.run_dir)
    wrong = not_started(ranks) if given.started else complaints(ranks, given.max_age_s)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
