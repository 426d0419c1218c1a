"""History of a simulated world: events with times, and totals per rank and link."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from distlab.sim.reporting.sites import Site

NOWHERE: Site = ("", 0, "")
Row = tuple[int, str, str, float, float, int, int, Site, int]  # an Event, but faster to construct


class Event(NamedTuple):
    """Something a rank did from ``start_s`` to ``end_s``, in virtual time.

    Attributes:
        kind: "compute", "send", "recv", "collective" or "wait".
        name: Name of the call or of the awaited operation; "" for computation.
        num_bytes: Bytes of this rank's tensors.
        peer: Global rank of the other side of a send or recv; -1 for other kinds.
        site: File, line and function of the call.
        message: Message number, shared by a send and its recv; -1 for other kinds.
    """

    rank: int
    kind: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    peer: int = -1
    site: Site = NOWHERE
    message: int = -1


class Trace:
    """Collects events and totals while the world runs.

    Args:
        has_events: True to keep events, False to only count them.

    Attributes:
        bytes_by_link: Bytes that have arrived over each link; the network updates it.
    """

    def __init__(self, num_ranks: int, *, has_events: bool = True) -> None:
        self.has_events = has_events
        self.bytes_by_link: list[float] = []
        self.leftovers: list[str] = []  # operations that never matched, one line each
        self.waited_twice: list[str] = []  # messages, one line each
        self.unwaited: list[str] = []  # handles never waited for, one line each, sorted by rank
        self.killed_in_step_s: dict[int, float] = {}  # rank -> virtual time of its death
        self.network_s = 0.0  # time at which all ranks had ended and all bytes had arrived
        self._rows: list[Row] = []
        # For each destination, the number of messages that have arrived, by source.
        self._arrived: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        self.bytes_sent = [0.0] * num_ranks
        self.bytes_received = [0.0] * num_ranks
        self.messages = [0] * num_ranks
        self.collectives = [0] * num_ranks
        self.compute_s = [0.0] * num_ranks
        self.exposed_s = [0.0] * num_ranks
        self.peak_bytes = [0] * num_ranks
        self.peak_by_category: list[dict[str, int]] = [{} for _ in range(num_ranks)]

    def state(self) -> dict[str, Any]:
        """Return everything collected as plain data, to be sent to another process."""
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: object) -> "Trace":
        """Return the trace that another process has sent.

        Raises:
            ValueError: ``state`` was not returned by ``Trace.state``.
        """
        trace = cls(1)
        wanted = {name: type(value) for name, value in vars(trace).items()}
        if not isinstance(state, dict) or {k: type(v) for k, v in state.items()} != wanted:
            raise ValueError("what was sent is not a trace")
        vars(trace).update(state)
        return trace

    @property
    def events(self) -> list[Event]:
        """All events, ordered by end time.

        Raises:
            ValueError: the trace has only counted them.
        """
        if not self.has_events:
            raise ValueError("events were only counted: simulate with Options(has_events=True)")
        return list(map(Event._make, self._rows))

    def take_events(self) -> list[Event]:
        """Return all events since the last call, and forget them."""
        rows, self._rows = self._rows, []
        return list(map(Event._make, rows))

    def carried(self, src: int, dst: int, num_bytes: float, messages: int) -> None:
        """Count bytes and messages from one rank to another, whatever call they belong to."""
        self.bytes_sent[src] += num_bytes
        self.bytes_received[dst] += num_bytes
        self.messages[src] += messages

    def record(self, event: Row) -> None:
        """Record a finished operation."""
        rank, kind, peer = event[0], event[1], event[6]
        if kind == "collective":
            self.collectives[rank] += 1
        elif kind == "recv":
            arrived = self._arrived[rank]
            arrived[peer] = arrived.get(peer, 0) + 1
        if self.has_events:
            self._rows.append(event)

    def waited(self, rank: int, name: str, site: Site, start_s: float, end_s: float) -> None:
        """Record that a rank waited for an operation."""
        self.exposed_s[rank] += end_s - start_s
        if self.has_events:
            self._rows.append((rank, "wait", name, start_s, end_s, 0, -1, site, -1))

    def computed(self, rank: int, start_s: float, end_s: float) -> None:
        """Record computation between two communication calls."""
        self.compute_s[rank] += end_s - start_s
        if self.has_events:
            self._rows.append((rank, "compute", "", start_s, end_s, 0, -1, NOWHERE, -1))

    def pairs(self) -> Iterator[tuple[Event, Event]]:
        """Yield every send with its recv, in order of arrival."""
        events = self.events
        sends = {event.message: event for event in events if event.kind == "send"}
        for event in events:
            if event.kind == "recv":
                yield sends[event.message], event

    def begin_run(self) -> None:
        """Count arrived messages anew."""
        for by_source in self._arrived:
            by_source.clear()

    def arrived(self) -> dict[tuple[int, int], int]:
        """Return the number of messages that have arrived in this run, by (source, destination)."""
        return {
            (src, dst): number
            for dst, by_source in enumerate(self._arrived)
            for src, number in by_source.items()
        }

    def digest(self) -> str:
        """Return a hash of all events; leave out file names, which differ between machines."""
        sha = hashlib.sha256()
        for e in self.events:
            line = (e.rank, e.kind, e.name, e.start_s, e.end_s, e.num_bytes, e.peer, e.site[1:])
            sha.update(repr(line).encode())
        return sha.hexdigest()


def departure_s(send: Event, recv: Event) -> float:
    """Return when the bytes left: at a buffered send, or else at the later of the two calls."""
    is_buffered = send.end_s == send.start_s
    return send.start_s if is_buffered else max(send.start_s, recv.start_s)


def lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Distribute events over as few lanes as possible, so that none overlap on a lane.

    0─────2
       1─────3         becomes   0─────2  3──4   and   1─────3
                3──4
    """
    lanes: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
        for lane in lanes:
            if lane[-1].end_s <= event.start_s:
                lane.append(event)
                break
        else:
            lanes.append([event])
    return lanes
