"""The time of one rank's GPUs, and the waits of its host."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distlab.sim.engine.scheduler import NEVER
from distlab.sim.gpu.streams import Communication, Moment, Stream
from distlab.sim.gpu.syncs import COPIES
from distlab.sim.reporting.sites import CallSite, Site


class WaitKey(NamedTuple):
    """A place at which the host waits, and the operation that waits."""

    site: Site
    reason: str


@dataclass
class HostSync:
    """The waits of one rank's host at one place.

    Attributes:
        waited_s: Seconds for which the host waited.
        idle_s: Seconds for which the GPU then had no work, because the host had lost its lead.
    """

    count: int = 0
    waited_s: float = 0.0
    idle_s: float = 0.0


class Work(NamedTuple):
    """Work on a stream, for pictures and traces.

    Attributes:
        parts: The operations of which communication consists; empty for a kernel or a copy.
    """

    stream: Stream
    name: str
    site: Site
    start: Moment
    seconds: float = 0.0
    parts: Sequence[Communication] = ()

    def end_s(self) -> float:
        """Return when the work ends; NEVER while that is unknown."""
        if self.parts:
            return max(part.done_s if part.is_done else NEVER for part in self.parts)
        self.start.fold()
        return NEVER if self.start.after else self.start.known_s + self.seconds


@dataclass
class Usage:
    """Times of a rank, in virtual seconds.

    Attributes:
        busy_s: Time of all kernels and copies.
        exposed_s: Time for which default streams waited for communication.
        late_s: Time for which streams with no communication to wait for had no work.
        num_kernels: Number of kernels and copies.
        kernels: Number of kernels, without copies, by the number of their GPU.
        placed: Call that first put a tensor on each GPU.
        syncs: Waits of the host by place and reason.
        tracks: All work on streams, if ``has_tracks``.
        first_parameter: Line that made or used the first parameter on the host.
        first_product: First matrix product or the like outside GPUs: name, device and line.
    """

    busy_s: float = 0.0
    exposed_s: float = 0.0
    late_s: float = 0.0
    waits_s: float = 0.0
    num_kernels: int = 0
    kernels: Counter[int] = field(default_factory=Counter)
    placed: dict[int, CallSite] = field(default_factory=dict)
    syncs: dict[WaitKey, HostSync] = field(default_factory=dict)
    tracks: list[Work] = field(default_factory=list)
    has_tracks: bool = False
    first_parameter: Site | None = None
    first_product: tuple[str, str, Site] | None = None
    _last: HostSync | None = None
    _unhindered: dict[Stream, float] = field(default_factory=dict)

    # `_unhindered` is when each stream would end if no sync had made the host wait: the host would
    # be earlier by all waits so far. A stream that idles now, but not then, idles because of a
    # sync; the last one that had to wait is charged.

    def launched(
        self,
        stream: Stream,
        host_s: float,
        seconds: float,
        name: str,
        site: Site,
        exposed_s: float,
    ) -> None:
        """Note a kernel or copy of ``seconds`` that is about to be put on a stream."""
        self.num_kernels += 1
        if name not in COPIES:
            self.kernels[stream.index] += 1
        self.busy_s += seconds
        self.exposed_s += exposed_s
        idle_s = 0.0 if stream.moment.after else max(0.0, host_s - stream.moment.known_s)
        unhindered_s = self._unhindered.get(stream, 0.0)
        early_s = host_s - self.waits_s
        idle_anyway_s = max(0.0, early_s - unhindered_s)
        self.late_s += idle_s
        if self._last is not None and idle_s > idle_anyway_s:
            self._last.idle_s += idle_s - idle_anyway_s
        self._unhindered[stream] = max(unhindered_s, early_s) + seconds
        if self.has_tracks:
            start = stream.moment.copy()
            start.known_s = max(start.known_s, host_s)
            self.tracks.append(Work(stream, name, site, start, seconds))

    def forget_tracks(self, until_s: float) -> None:
        """Forget the work that has ended by then."""
        self.tracks = [work for work in self.tracks if work.end_s() > until_s]

    def waited(self, reason: str, site: Site, seconds: float) -> None:
        """Note that the host has waited at a place."""
        self.waits_s += seconds
        sync = self.syncs.setdefault(WaitKey(site, reason), HostSync())
        sync.count += 1
        sync.waited_s += seconds
        if seconds:
            self._last = sync
