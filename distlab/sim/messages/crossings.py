"""Messages that were received with another tag than they were sent with, as NCCL lets them be.

    rank 0 sends        k with tag 0    v with tag 1
    rank 1 receives     v with tag 1    k with tag 0      values have changed places: 0 ─▶ 1 ─▶ 0

A message whose tags only differ, as if one rank gave it none, still comes to the right place.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from distlab.sim.messages.message import Message
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site

NO_TAGS = "NCCL ignores tags: messages from one rank to another meet in the order of the calls."
MAX_KEPT = 1_000
Channel = tuple[object, int, int]  # group, source and destination


class Crossing(NamedTuple):
    """A send and a recv with different tags that met, and their lines."""

    channel: Channel
    sent: int
    received: int
    sites: tuple[Site, Site]

    def text(self) -> str:
        """Return what met, and what to do about it."""
        (_, source, destination), (send, recv) = self.channel, self.sites
        return (
            f"rank {destination} receives with tag {self.received} ({place(recv)}) what rank "
            f"{source} sent with tag {self.sent} ({place(send)}). {NO_TAGS} Post the receives in "
            "the order of the sends."
        )


class Crossings:
    """The first messages that met with different tags."""

    def __init__(self) -> None:
        self._kept: dict[Crossing, None] = {}

    def note(self, send: Message, recv: Message) -> None:
        """Note a send and a recv with different tags that meet."""
        if len(self._kept) < MAX_KEPT:
            channel = send.key, send.rank, recv.rank
            self._kept[Crossing(channel, send.tag, recv.tag, (send.site, recv.site))] = None

    def lines(self) -> list[str]:
        """Return a text for each pair of lines."""
        return _texts(_by_lines(self._kept))

    def changed_places(self) -> list[str]:
        """Return a text for each pair of lines where values have changed places."""
        return _texts(self._changed())

    def others(self) -> list[str]:
        """Return a text for each pair of lines where none have."""
        changed = self._changed()
        return _texts(_by_lines(c for c in self._kept if c.sites not in changed))

    def _changed(self) -> "ByLines":
        met = defaultdict[tuple[Channel, int], set[int]](set)
        for crossing in self._kept:
            met[crossing.channel, crossing.sent].add(crossing.received)
        return _by_lines(c for c in self._kept if _comes_back(c, met))


ByLines = dict[tuple[Site, Site], Crossing]


def _by_lines(crossings: Iterable[Crossing]) -> ByLines:
    """Return the first crossing of each pair of lines."""
    first: ByLines = {}
    for crossing in crossings:
        first.setdefault(crossing.sites, crossing)
    return first


def _texts(crossings: ByLines) -> list[str]:
    return [crossing.text() for crossing in crossings.values()]


def _comes_back(crossing: Crossing, met: dict[tuple[Channel, int], set[int]]) -> bool:
    """Return whether a way of tags leads from the received one to the sent one."""
    seen, open_tags = set[int](), [crossing.received]
    while open_tags:
        tag = open_tags.pop()
        if tag not in seen:
            seen.add(tag)
            open_tags += met.get((crossing.channel, tag), ())
    return crossing.sent in seen
