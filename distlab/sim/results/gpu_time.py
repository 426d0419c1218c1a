"""Where the time of hosts and GPUs went, and what would be wrong on GPUs."""

import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distlab.sim.engine.trace import Event
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.util.text import counted, rank_names, seconds_text


class HostWait(NamedTuple):
    """The waits of one rank's host at one place.

    Attributes:
        reason: The operation that waits, such as ".item()".
        waited_s: Seconds for which the host waited.
        idle_s: Seconds for which the GPU then had no work, because the host had lost its lead.
    """

    rank: int
    site: Site
    reason: str
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    waited_s: float
    idle_s: float


class OnTrack(NamedTuple):
    """A kernel, a copy or communication, and the name of its stream."""

    track: str
    event: Event


class RankTime(NamedTuple):
    """Virtual seconds of one rank; the parts may overlap if it uses several streams.

    Attributes:
        busy_s: Time of all kernels and copies.
        exposed_s: Time for which the default stream waited for communication.
        late_s: Time for which streams had no work, because the host was late.
        waits_s: Time for which the host waited for the GPU.
    """

    busy_s: float
    exposed_s: float
    late_s: float
    waits_s: float
    num_kernels: int


@dataclass(frozen=True)
class GpuTime:
    """Times of all ranks under NCCL's semantics.

    Attributes:
        wrong: Lines on wrong uses, of memory and of communicators.
        tracks: Work of all streams; empty if events were only counted.
    """

    ranks: list[RankTime]
    host_waits: list[HostWait]
    wrong: list[str] = field(default_factory=list)
    tracks: list[OnTrack] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return everything but the tracks as plain data, to be sent to another process."""
        rows = {"ranks": [*map(tuple, self.ranks)], "host_waits": [*map(tuple, self.host_waits)]}
        return {**rows, "wrong": self.wrong}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "GpuTime":
        """Return the times that another process has sent."""
        ranks = [*map(RankTime._make, state["ranks"])]
        waits = [*map(HostWait._make, state["host_waits"])]
        return cls(ranks, waits, [*state["wrong"]])

    def sync_rows(self) -> list[tuple[str, ...]]:
        """Return a table of the places at which hosts wait, with those that idle GPUs most first.

        The numbers are those of the rank whose GPU idled longest.
        """
        places: dict[tuple[Site, str], list[HostWait]] = {}
        for wait in self.host_waits:
            places.setdefault((wait.site, wait.reason), []).append(wait)
        dearest = sorted(map(_dearest_first, places.values()), key=_cost, reverse=True)
        return [_row(waits) for waits in dearest]

    def sync_remedies(self) -> list[str]:
        """Return what to do about the program's own lines that wait again and again."""
        waits = (w for w in self.host_waits if w.count > 1 and w.idle_s > 0)
        repeated = [wait.reason for wait in waits if ", in " not in wait.reason]
        return [
            f"{name}: {remedy}"
            for (name, pattern), remedy in _REMEDIES.items()
            if any(re.search(pattern, reason) for reason in repeated)
        ]

    def bottleneck(self, launch_s: float) -> str:
        """Return a sentence if GPUs wait for hosts more than for all else; "" if they do not.

        Args:
            launch_s: Time of a host per kernel.
        """
        late = {
            rank: time
            for rank, time in enumerate(self.ranks)
            if time.late_s > max(time.busy_s, time.exposed_s)
        }
        if not late:
            return ""
        launches_s = sum(time.num_kernels for time in late.values()) * launch_s
        is_by_launches = launches_s > sum(time.late_s for time in late.values()) / 2
        return f"{rank_names(late)}: {_LAUNCH_BOUND if is_by_launches else _HOST_BOUND}"


_LAUNCH_BOUND = (
    "launch-bound. The GPU spends most of its time waiting for the host to launch the next kernel. "
    "What helps: larger batches, or fewer kernels, by foreach or fused optimizers, one all_reduce "
    "of a flat bucket instead of one per gradient, or torch.compile."
)
_HOST_BOUND = (
    "host-bound. The GPU spends most of its time waiting for the host, which does something else "
    "than launching kernels: it sleeps, loads data, or waits for another rank, a store or a thread."
)
SYNC_HEADINGS = ("place", "waits in", "times", "waited", "GPU idle", "")


_REMEDIES = {
    ("a value", r"item|tolist|copy to the host"): (
        "add up on the GPU, and read the sum once; choose with torch.where instead of an if"
    ),
    ("a copy from pageable memory", "from pageable"): "pin_memory() and non_blocking=True",
    ("a result of unknown size", r"mask|nonzero|unique|bincount|repeat_interleave"): (
        "keep the size, with torch.where, weights of 0, or the option that gives the size"
    ),
    ("an index on the host", "index on the host"): "put the index on the GPU once",
}


def _dearest_first(waits: Sequence[HostWait]) -> list[HostWait]:
    return sorted(waits, key=lambda wait: (-wait.idle_s, -wait.waited_s))


def _cost(waits: Sequence[HostWait]) -> tuple[float, float]:
    return waits[0].idle_s, waits[0].waited_s


def _row(waits: Sequence[HostWait]) -> tuple[str, ...]:
    ranks, worst = rank_names([wait.rank for wait in waits]), waits[0]
    times = seconds_text(worst.waited_s), seconds_text(worst.idle_s)
    return place(worst.site), _operation(worst), f"{worst.count:,}", *times, ranks


def _operation(wait: HostWait) -> str:
    """Return the operation that waits, as the program writes it: ``if x`` calls no ``item()``."""
    line = linecache.getline(wait.site[0], wait.site[1])
    is_hidden = wait.reason in (".item()", ".tolist()") and wait.reason[:-2] not in line
    return "a value that the host needs" if line and is_hidden else wait.reason


def merged(lines: Iterator[tuple[int, str, int]]) -> Iterator[str]:
    """Yield each line once, behind the ranks that have it.

    Args:
        lines: Rank, text, and number of times.
    """
    by_text: dict[str, dict[int, int]] = {}
    for rank, text, count in lines:
        by_text.setdefault(text, {})[rank] = count
    for text, counts in by_text.items():
        most = max(counts.values())
        often = f" ({counted(most, 'time')})" if most > 1 else ""
        yield f"{rank_names(counts)}  {text}{often}"
