"""Wrong uses of memory: before it is ready, while it is being read, or after it was given away.

Each use of a storage is an ``Access`` on a stream, or by the host. Two uses of the same bytes, of
which one writes, have to be ordered by a stream, an event, ``wait()`` or a wait of the host. The
vector clocks of ``streams`` tell whether they are, whatever the durations, as in the sanitizer
that torch has for CUDA.
"""

import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from distlab.sim.engine.trace import NOWHERE
from distlab.sim.gpu.accesses import Access
from distlab.sim.gpu.placement import Home
from distlab.sim.gpu.streams import Stream
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site

_CALL_NUMBER = re.compile(r"(?<=\(call )\d+")
MAX_ACCESSES = 64  # accesses that are remembered of one storage
_AS_WRITTEN = {"_local_scalar_dense": "item()", "_to_copy": "to()"}  # names of operations
_INTO_BUFFERS = ("all_gather", "all_to_all", "recv", "scatter")  # calls that fill other tensors
SMALL_BYTES = 2**20  # torch's allocator reuses smaller blocks only for small tensors


class Hazard(NamedTuple):
    """A wrong use, and the use that it is not ordered with.

    Attributes:
        text: What happens, such as "mul reads what all_reduce (…) writes".
        remedy: What orders them.
    """

    text: str
    site: Site
    other: Site
    remedy: str

    def line(self) -> str:
        """Return the hazard in one line, with both places in the program."""
        other = f" ({place(self.other)})" if self.other[0] else ""
        return f"{place(self.site)}: {self.text}{other}: {self.remedy}"


class Hazards:
    """The wrong uses of one rank, each counted once per pair of lines.

    Args:
        streams: All streams of the rank.
        is_ending: Function that returns whether the rank is being ended. Its waits are cut short
            then, so what it does afterwards is no fault of the program.
    """

    def __init__(self, streams: Iterable[Stream], is_ending: Callable[[], bool]) -> None:
        self._streams, self._is_ending = streams, is_ending
        self._counts: Counter[Hazard] = Counter()
        self._first: dict[Hazard, Hazard] = {}

    def add(self, hazard: Hazard) -> None:
        """Count a wrong use; those of later calls in a loop count as the first one."""
        if not self._is_ending():
            anywhere = hazard._replace(text=_CALL_NUMBER.sub("", hazard.text))
            self._counts[self._first.setdefault(anywhere, hazard)] += 1

    def __iter__(self) -> Iterator[tuple[Hazard, int]]:
        return iter(self._counts.items())

    def use(self, home: Home, access: Access) -> None:
        """Compare a use with the earlier ones of the storage, and remember it.

        It takes the place of earlier ones where whoever comes after it comes after them, too.
        """
        if not home.accesses:
            home.accesses = [access]
            return
        kept = []
        for earlier in home.accesses:
            if access.stream.has_reached(earlier.stream, earlier.number):
                is_over = access.takes_place_of(earlier)
            elif is_over := access.conflicts_with(earlier):
                # A stream without an order is told of once; another one needs an order of its own.
                if not _is_known(earlier, access.stream, home.accesses):
                    self.add(_hazard(earlier, access, self._streams))
                is_over = access.is_write
            if not is_over:
                kept.append(earlier)
        home.accesses = [*kept[1 - MAX_ACCESSES :], access]


def _is_known(earlier: Access, stream: Stream, accesses: Iterable[Access]) -> bool:
    """Return whether a use on ``stream`` has been compared with ``earlier`` before."""
    since = itertools.dropwhile(lambda access: access is not earlier, accesses)
    return any(use.stream is stream and use.conflicts_with(earlier) for use in since)


def _hazard(earlier: Access, later: Access, streams: Iterable[Stream]) -> Hazard:
    verb = "overwrites" if later.is_write else "reads"
    what = "writes" if earlier.is_write else "reads"
    one, other = (_AS_WRITTEN.get(use.text, use.text) for use in (later, earlier))
    text = f"{one} {verb} what {other} {what}, and nothing orders the two"
    return Hazard(text, later.site, earlier.site, _remedy(earlier, later, streams))


def _remedy(earlier: Access, later: Access, streams: Iterable[Stream]) -> str:
    if earlier.stream.name.startswith("NCCL"):
        return _wait_for(earlier, later, streams)
    if remedy := _of_event(earlier, later):
        return remedy
    if later.stream.index < 0:
        return f"synchronize {earlier.stream.name}, or an event behind the copy, before"
    if later.stream.name.startswith("NCCL"):
        return f"let the current stream wait for {earlier.stream.name} before the call"
    return f"let {later.stream.name} wait for {earlier.stream.name}: wait_stream() or wait_event()"


def _of_event(earlier: Access, later: Access) -> str:
    """Return why the event for which the later stream waits does not order them, and a remedy."""
    event, name = later.stream.waited, earlier.stream.name
    if event is None:
        return ""
    is_of_nccl = later.stream.name.startswith("NCCL")  # the current stream is what waits
    who = "the current stream" if is_of_nccl else later.stream.name
    waits = f"{who} waits ({place(event.waited_at)}) for an event that was"
    if event.recorded is None:
        return f"{waits} not recorded yet: record it on {name} first, behind that line"
    stream, site = event.recorded
    if stream is later.stream or is_of_nccl:
        return f"{waits} recorded on itself ({place(site)}): record it on {name}, behind that line"
    if stream is earlier.stream:
        return f"{waits} recorded ({place(site)}) before that: wait for one that is recorded behind"
    elsewhere = f"{waits} recorded on {stream.name} ({place(site)})"
    is_of_host = later.stream.index < 0
    return f"{elsewhere}: record it on {name}, behind that line" if is_of_host else ""


def _wait_for(earlier: Access, later: Access, streams: Iterable[Stream]) -> str:
    """Return what makes a stream wait for communication; another one may do so already."""
    for stream in streams:
        if stream is not earlier.stream and stream.has_reached(earlier.stream, earlier.number):
            return (
                f"only {stream.name} waits for it, so let {later.stream.name} wait for that: "
                "wait_stream() or wait_event()"
            )
    is_for_more = not later.is_write and earlier.text.startswith(_INTO_BUFFERS)
    other = ", or let it write elsewhere, if what was there before is meant" * is_for_more
    return f"call wait() on its handle first{other}"


def in_one_batch(one: str, other: str, site: Site) -> Hazard:
    """Return the hazard of two messages that are sent at the same time; one of them writes."""
    text = f"{one} and {other} of one batch use the same memory at the same time"
    return Hazard(text, site, NOWHERE, "receive into another tensor")


def too_late(text: str, took_s: float, timeout: str, site: Site) -> Hazard:
    """Return the hazard of communication that torch's watchdog would not have waited for."""
    text = (
        f"{text} ends {took_s:.3g} s after its launch, for which torch's watchdog does not wait, "
        f"as its group has a timeout of {timeout}"
    )
    remedy = "give the group a longer timeout=, or let the ranks wait for less time"
    return Hazard(text, site, NOWHERE, remedy)


class Grave:
    """Takes notes of memory that was freed while another stream might still use it.

    torch's allocator gives freed memory to the next tensor that is allocated on the same stream. It
    knows of uses on other streams only by ``record_stream``.

    Args:
        add: Function that counts a wrong use.
    """

    def __init__(self, add: Callable[[Hazard], None]) -> None:
        self._add = add
        # Storages die at any point, in any thread: only appending is safe then.
        self._fresh: deque[tuple[Stream, int, Access]] = deque()
        self._waiting: list[tuple[Stream, int, Access]] = []

    def take(self, home: Home) -> None:
        """Note the uses of freed memory on other streams than its own."""
        if home.stream is None:
            return
        for access in home.accesses:
            stream = access.stream
            is_foreign = stream is not home.stream and stream.index == home.index
            is_known = stream in home.recorded or stream.name.startswith("NCCL")
            if is_foreign and not is_known:
                self._fresh.append((home.stream, home.num_bytes, access))

    @property
    def is_empty(self) -> bool:
        """True if no memory was freed too early."""
        return not (self._fresh or self._waiting)

    def reuse(self, stream: Stream, num_bytes: int, site: Site) -> None:
        """Look for freed memory that a new tensor on ``stream`` may get while others use it."""
        while self._fresh:
            self._waiting.append(self._fresh.popleft())
        still_used = []
        for note in self._waiting:
            home, size, access = note
            if home.has_reached(access.stream, access.number):
                continue
            if home is stream and _fits(num_bytes, size):
                self._add(_too_early(access, site))
            else:
                still_used.append(note)
        self._waiting = still_used


def _fits(num_bytes: int, size: int) -> bool:
    return 0 < num_bytes <= size and (num_bytes < SMALL_BYTES) == (size < SMALL_BYTES)


def _too_early(access: Access, site: Site) -> Hazard:
    verb = "writes" if access.is_write else "reads"
    text = f"a new tensor may get the memory that {access.text} still {verb} on another stream"
    remedy = f"call record_stream({access.stream.name}) on the tensor before it is freed"
    return Hazard(text, site, access.site, remedy)
