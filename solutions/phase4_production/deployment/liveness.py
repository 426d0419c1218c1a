"""Checks whether the ranks of this container are still training: a probe for Kubernetes and Docker.

    python liveness.py RUN_DIR MAX_AGE_S             fails if a rank here has been silent too long
    python liveness.py RUN_DIR MAX_AGE_S --started   fails until each rank here has a heartbeat

A rank touches ``RUN_DIR/heartbeat.rank<r>`` once a second while it makes progress. An open port
would prove nothing: a rank that hangs in a collective keeps its ports open. All nodes share
RUN_DIR, and torchrun renumbers the ranks at each rendezvous, so the ranks here are found through
``/proc``.

The file server stamps a heartbeat with its own clock, which may differ from this machine's. The
probe therefore compares no clocks: it remembers in the temporary folder, from one call to the next,
what each stamp was, and when it last saw it change. Only a stamp that changes is a heartbeat.

A new rank has MAX_AGE_S seconds from its start, even if its predecessor has left an old heartbeat
behind. The probe also passes while no rank runs here: torchrun then waits for other nodes, for as
long as its own timeouts allow.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Rank(NamedTuple):
    """What is known of a rank that runs in this container; times are seconds since the boot."""

    number: int
    started_s: float  # start of its process
    first: int | None  # stamp of its heartbeat at the first look; None: there was none
    latest: int | None  # stamp at the last look
    changed_s: float  # time of the first look, or of the last one that found another stamp
    looked_s: float  # time of the last look


def look(run_dir: Path) -> list[Rank]:
    """Look at the ranks of a run that are on this machine, or in this container; remember them.

    Args:
        run_dir: folder that the trainer got as ``--run_dir``.
    """
    started_s: dict[int, float] = {}
    for number, seconds in _processes(str(run_dir)):  # DataLoader workers are younger
        started_s[number] = min(seconds, started_s.get(number, math.inf))
    known = {(rank.number, rank.started_s): rank for rank in _remembered(run_dir)}
    ranks = []
    for number, seconds in sorted(started_s.items()):
        stamp, now_s = _stamp(run_dir / f"heartbeat.rank{number}"), _uptime_s()
        before = known.get((number, seconds), Rank(number, seconds, stamp, stamp, now_s, now_s))
        changed_s = before.changed_s if stamp == before.latest else now_s
        ranks.append(before._replace(latest=stamp, changed_s=changed_s, looked_s=now_s))
    _remember(run_dir, ranks)
    return ranks


def complaints(ranks: Sequence[Rank], max_age_s: float) -> list[str]:
    """Return one line for each rank that has been silent for too long."""
    silent_s = {rank.number: rank.looked_s - rank.changed_s for rank in ranks}
    return [
        f"rank {number} has been silent for {seconds:.0f} s, {max_age_s:.0f} s are allowed"
        for number, seconds in silent_s.items()
        if seconds > max_age_s
    ]


def not_started(ranks: Sequence[Rank]) -> list[str]:
    """Return one line for each rank without a heartbeat yet, or one line if no rank runs here."""
    waiting = {r.number: r.looked_s - r.started_s for r in ranks if r.latest == r.first}
    lines = [f"rank {number} has given no heartbeat in {s:.0f} s" for number, s in waiting.items()]
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


def _stamp(heartbeat: Path) -> int | None:
    """Return the time that a heartbeat was last touched, by the file server's clock."""
    try:
        return heartbeat.stat().st_mtime_ns
    except OSError:  # there is none, or the file server does not answer
        return None


def _memory(run_dir: Path) -> Path:
    name = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"liveness-{os.getuid()}-{name}.json"


def _remembered(run_dir: Path) -> list[Rank]:
    """Return the ranks of the last look; none if there is none, or it was cut off."""
    try:
        return [Rank(*fields) for fields in json.loads(_memory(run_dir).read_text())]
    except (OSError, ValueError):
        return []


def _remember(run_dir: Path, ranks: Sequence[Rank]) -> None:
    with suppress(OSError):  # a full disk must not kill a training that is well
        _memory(run_dir).write_text(json.dumps(ranks))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong; return the probe's exit code: 0 if nothing is wrong, otherwise 1."""
    parser = argparse.ArgumentParser(description="Do the ranks of this container still train?")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("max_age_s", type=float, help="above the longest evaluation and save")
    parser.add_argument("--started", action="store_true", help="whether each has given one yet")
    given = parser.parse_args(arguments)
    ranks = look(given.run_dir)
    wrong = not_started(ranks) if given.started else complaints(ranks, given.max_age_s)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
