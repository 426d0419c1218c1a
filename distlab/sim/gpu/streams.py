"""A GPU's streams: when each gets to its work, and which other work has to be done by then.

The host only puts work on a stream. A kernel starts once the host has launched it and the stream is
done with all work before it. If that includes communication that is still under way, the time is
not known yet, but it is known how long after the communication's end it will be:

    host     launch a ─ launch wait ─ launch b              the stream's end, as a Moment:
    stream   ── a ──────┐                                   max(end of a, end of all_reduce) + b
    channel         ── all_reduce ──┴── b ──
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from distlab.sim.reporting.sites import Site


class Communication(Protocol):
    """The parts of an operation under way that streams use."""

    is_done: bool
    done_s: float

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the operation is done."""


class Moment:
    """A point in time that may depend on communication under way.

    Attributes:
        known_s: Earliest time, in virtual seconds, as far as it is known.
        after: For each communication that it depends on, the seconds that pass after its end.
    """

    __slots__ = ("after", "known_s")

    def __init__(self, known_s: float = 0.0, after: dict[Communication, float] | None = None):
        self.known_s, self.after = known_s, after or {}

    def copy(self) -> "Moment":
        return Moment(self.known_s, {**self.after})

    def join(self, other: "Moment") -> None:
        """Become the later one of both moments."""
        self.known_s = max(self.known_s, other.known_s)
        for communication, seconds in other.after.items():
            self.after[communication] = max(self.after.get(communication, 0.0), seconds)

    def put(self, host_s: float, seconds: float) -> None:
        """Become the end of work of ``seconds`` that the host launches at ``host_s``."""
        self.known_s = max(self.known_s, host_s) + seconds
        for communication in self.after:
            self.after[communication] += seconds

    def fold(self) -> float:
        """Replace communication that is done by its time; return by how much that is later."""
        before_s = self.known_s
        for communication in [c for c in self.after if c.is_done]:
            self.known_s = max(self.known_s, communication.done_s + self.after.pop(communication))
        return self.known_s - before_s

    def when_known(self, action: Callable[[float], None]) -> None:
        """Call ``action`` with the time, in virtual seconds, as soon as it is known."""
        self.fold()
        if not self.after:
            return action(self.known_s)
        return next(iter(self.after)).then(lambda: self.when_known(action))


Reached = dict["Stream", int]  # for each stream, the number of its last work that is done by then


class Stream:
    """A queue of work, or the host, which also has an order with the queues.

    The order is kept as vector clocks. ``reached`` says for each other stream how far it is
    certain to have got by the time of this stream's next work, whatever the durations are.

    Args:
        name: Name for reports, such as "the default stream".
        index: Number of its GPU; -1 for the host.
        reached: Work that is done before the stream's first.

    Attributes:
        moment: End of the work so far.
        waited: The latest event that the program has made it wait for.
    """

    __slots__ = ("index", "moment", "name", "reached", "waited")

    def __init__(self, name: str, index: int, reached: Reached | None = None) -> None:
        self.name, self.index = name, index
        self.moment = Moment()
        self.reached: Reached = {**(reached or {})}
        self.waited: WaitedEvent | None = None

    @property
    def waits_for_itself(self) -> bool:
        """True if the latest event that it waits for was recorded on it, which orders nothing."""
        return bool(self.waited and self.waited.recorded and self.waited.recorded[0] is self)

    def next_number(self) -> int:
        """Return the number of the stream's next work."""
        self.reached[self] = number = self.reached.get(self, 0) + 1
        return number

    def comes_after(self, reached: Reached) -> None:
        """Make all further work come after what ``reached`` says."""
        mine = self.reached
        for stream, number in reached.items():
            if number > mine.get(stream, 0):
                mine[stream] = number

    def has_reached(self, stream: "Stream", number: int) -> bool:
        """Return whether a stream's work is certain to be done before this stream's next work."""
        return stream is self or self.reached.get(stream, 0) >= number


class WaitedEvent(NamedTuple):
    """An event that a stream waits for, and the lines of the program that say so.

    Attributes:
        recorded: Stream and line of the latest record; None if it had never been recorded.
    """

    recorded: tuple[Stream, Site] | None
    waited_at: Site


class Mark:
    """A stream's position, as an event records it and another stream waits for it.

    Attributes:
        index: Number of the stream's GPU.
    """

    __slots__ = ("index", "moment", "reached")

    def __init__(self, moment: Moment, reached: Reached, index: int) -> None:
        self.moment, self.reached, self.index = moment, reached, index

    @classmethod
    def of(cls, stream: Stream, host_s: float) -> "Mark":
        """Return the stream's position, which is not before the host's time."""
        moment = stream.moment.copy()
        moment.known_s = max(moment.known_s, host_s)
        return cls(moment, {**stream.reached}, stream.index)

    def hold(self, streams: Iterable[Stream]) -> None:
        """Make the further work of these streams wait for it."""
        for stream in streams:
            stream.moment.join(self.moment)
            stream.comes_after(self.reached)
