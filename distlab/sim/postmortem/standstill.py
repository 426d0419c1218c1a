"""A deadlocked world: which ranks wait for which, as a graph and in words.

    rank 4 ──▶ rank 3 ──▶ rank 1 ⇄ rank 2        ranks 1 and 2 are a knot, 3 and 4 its victims
    rank 5 ──▶ rank 0, which has returned        a second cause

An arrow means "waits for". A knot is a set of ranks that wait for each other and for no other rank.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from distlab.sim.messages.group_names import GroupNames
from distlab.sim.messages.message import Message
from distlab.sim.messages.pending import ANY_SOURCE, Pending
from distlab.sim.messages.roster import MadeGroup
from distlab.sim.messages.shifts import Splits
from distlab.sim.messages.store import KeyWait
from distlab.sim.reporting.sites import Death, Exit, Site
from distlab.util.text import clauses, rank_names, verb

MAX_CLAUSES = 3  # maximum number of clauses in a sentence; a longer one keeps its first two

Graph = Mapping[int, Sequence[int]]  # blocked rank -> ranks that it waits for


def find_knots(waits_for: Graph) -> list[list[int]]:
    """Return the sets of ranks that wait only for each other, directly or indirectly."""
    reach = {rank: sum(1 << peer for peer in peers) for rank, peers in waits_for.items()}
    for via in reach:
        for rank in reach:
            if reach[rank] >> via & 1:
                reach[rank] |= reach[via]
    sets: dict[int, list[int]] = {}
    for rank in sorted(reach):
        if reach[rank] >> rank & 1:
            sets.setdefault(reach[rank], []).append(rank)
    return [ranks for bits, ranks in sets.items() if bits == sum(1 << rank for rank in ranks)]


def find_cycle(waits_for: Graph) -> list[int]:
    """Return a cycle of ranks in which each one waits for the next; [] if there is no cycle.

    The last rank waits for the first. The cycle is a shortest one through the lowest rank that is
    on any cycle.
    """
    for start in sorted(waits_for):
        paths, seen = [[start]], {start}
        for path in paths:
            for peer in sorted(waits_for[path[-1]]):
                if peer == start:
                    return path
                if peer in waits_for and peer not in seen:
                    seen.add(peer)
                    paths.append([*path, peer])
    return []


def named(ahead: Sequence[Pending]) -> str:
    """Name operations ahead, as in ``isend to rank 1`` or ``batch with the isend to rank 1``."""
    first = ahead[0]
    if not isinstance(first, Message):
        return first.title()
    name = f"i{first.name} {first.toward()}"
    return f"batch with the {name}" if first.is_in_batch else name


class History(NamedTuple):
    """Earlier calls of the ranks that deadlocked, all in the same run, and the rules in force.

    Attributes:
        calls: Number of torch.distributed calls and the last of them, by rank.
        arrived: Number of messages that have arrived, by (source, destination).
        groups: All groups that were made, by key.
        exits: Exits of the ranks, by rank, if known.
        splits: Collective calls that the ranks of a group made at different lines.
        is_in_order: True if messages between two ranks ran one at a time (``Options.p2p_order``).
        deaths: Ranks that a fault has killed, if known.
        is_session: True in a session, whose groups count the calls of all runs.
        absent: Ranks that do not take part in this run of a session.
    """

    calls: Mapping[int, tuple[int, Pending]] = MappingProxyType({})
    arrived: Mapping[tuple[int, int], int] = MappingProxyType({})
    groups: Mapping[object, MadeGroup] = MappingProxyType({})
    exits: Mapping[int, Exit] = MappingProxyType({})
    splits: Splits = Splits()
    is_in_order: bool = False
    deaths: Mapping[int, Death] = MappingProxyType({})
    is_session: bool = False
    absent: Collection[int] = ()


NO_HISTORY = History()
ABSENT = "not in this run"


class Standstill:
    """The waits of all ranks in a world that cannot continue.

    Args:
        blocked: Operations that block ranks, by rank.
        ended: Ranks that have returned or been killed.
        killed: Ranks that a fault has killed, which are also in ``ended``.
        history: Earlier calls of the ranks.
        unmatched: Sends and recvs that have started but not matched.
        queued: Sends and recvs that have not started, because the rank's earlier ones are not done.
        waits_at: Line on which each rank waits, by rank; it may differ from the line of the call.
        beside: Operations that block other threads of the ranks.
    """

    def __init__(
        self,
        blocked: Mapping[int, Pending],
        ended: Iterable[int] = (),
        killed: Iterable[int] = (),
        history: History = NO_HISTORY,
        unmatched: Iterable[Message] = (),
        queued: Iterable[Message] = (),
        waits_at: Mapping[int, Site] = MappingProxyType({}),
        beside: Iterable[Pending] = (),
    ) -> None:
        self.history = history
        self.group_names = GroupNames(blocked.values(), history.groups)
        self.blocked = dict(sorted(blocked.items()))
        self.ended, self.killed = set(ended), set(killed)
        self.unmatched = sorted(unmatched, key=lambda message: message.rank)
        self.queued = sorted(queued, key=lambda message: message.rank)
        self.waits_at, self.beside = waits_at, list(beside)
        self.waits_for = {rank: self._peers(wait) for rank, wait in self.blocked.items()}

    def _peers(self, wait: Pending) -> list[int]:
        """Return the ranks that a wait is for; if any one of them would do, only running ones."""
        peers = list(wait.waits_for())
        running = [peer for peer in peers if peer not in self.ended]
        if isinstance(wait, KeyWait):
            return running or [wait.rank]
        if isinstance(wait, Message) and wait.peer == ANY_SOURCE:
            return running or peers or [wait.rank]
        return peers

    def deserted(self) -> list[list[int]]:
        """Return the ranks that wait for a rank that has ended, grouped by equal waits."""
        return self._alike(
            rank for rank, peers in self.waits_for.items() if not self.ended.isdisjoint(peers)
        )

    def knots(self) -> list[list[int]]:
        """Return the sets of ranks that wait only for each other."""
        return find_knots(self.waits_for)

    @cached_property
    def mates(self) -> dict[int, list[int]]:
        """For each rank, the ranks with an equal wait, itself included."""
        return {rank: group for group in self._alike(self.blocked) for rank in group}

    # Wording of the report

    def sentence(self, ranks: Sequence[int]) -> str:
        """Describe a wait that ranks have in common, as in ``rank 0 waits for rank 1 to send``."""
        return f"{rank_names(ranks)} {verb(ranks, 'wait')} {self._wait(ranks[0])}"

    def sentences(self, ranks: Iterable[int]) -> str:
        """Describe the waits of ranks, in the given order."""
        groups = self._alike(ranks)
        sentences = [self.sentence(group) for group in groups[:MAX_CLAUSES]]
        if len(groups) <= MAX_CLAUSES:
            return clauses(sentences)
        return clauses([*sentences[:2], f"{sum(map(len, groups[2:]))} more ranks wait"])

    def circle(self, groups: Sequence[Sequence[int]]) -> str:
        """Describe how groups of ranks wait for each other in a circle."""
        if len(groups) <= MAX_CLAUSES:
            return clauses([self.sentence(group) for group in groups])
        return ", ".join([*map(self.sentence, groups[:2]), "…", self.sentence(groups[-1])])

    def fates(self, ranks: Iterable[int]) -> str:
        """Return how ranks have ended, such as ``rank 1 has returned``."""
        killed = sorted(self.killed.intersection(ranks))
        absent = sorted({*ranks}.intersection(self.history.absent) - self.killed)
        returned = sorted({*ranks}.difference(killed, absent))
        fates = []
        if absent:
            fates.append(f"{rank_names(absent)} {verb(absent, 'are', 'is')} {ABSENT}")
        if returned:
            fates.append(f"{rank_names(returned)} {verb(returned, 'have', 'has')} returned")
        if killed:
            fates.append(f"{rank_names(killed)} {verb(killed, 'were', 'was')} killed by a fault")
        return clauses(fates)

    def _wait(self, rank: int) -> str:
        wait = self.blocked[rank]
        if isinstance(wait, Message):
            if ahead := wait.ahead():
                return f"in {wait.name} behind its {named(ahead)}"
            peer = "any rank" if wait.peer == ANY_SOURCE else rank_names([wait.peer])
            peer = "itself" if wait.peer == rank else peer
            return f"for {peer} to {'send' if wait.name == 'recv' else 'receive'}"
        if isinstance(wait, KeyWait):
            keys = ", ".join(map(repr, wait.keys))
            return f"for the {verb(wait.keys, 'keys', 'key')} {keys}, {wait.fate()}"
        name = self.group_names.name(wait)
        on = f" on {name}" if name else ""
        return f"in {wait.title()}{on} for {rank_names(self.waits_for[rank])}"

    def _alike(self, ranks: Iterable[int]) -> list[list[int]]:
        """Group ranks by equal waits."""
        groups: dict[str, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self._wait(rank), []).append(rank)
        return list(groups.values())
