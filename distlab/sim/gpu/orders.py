"""The orders in which ranks reach collectives and new communicators, which wait for all members.

Each of these is a node of a graph. An edge is one rank's order of two nodes: its host reaches the
second only after the first, or launches both, and nothing orders them. A cycle may hang:

    rank 0   all_reduce of its row, all_reduce of its column       row ──▶ column
    rank 1   all_reduce of its column, all_reduce of its row       column ──▶ row

A node is settled once all its ranks have reached it and all nodes before it are settled. It can no
longer be on a cycle and is forgotten, so the graph stays small if ranks stay close together.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distlab.sim.gpu.streams import Reached, Stream
from distlab.sim.messages.group_names import GroupNames
from distlab.sim.messages.meetings import Attendance
from distlab.sim.messages.message import Communicator, Message
from distlab.sim.messages.pending import Pending
from distlab.sim.messages.roster import MadeGroup
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.util.text import clauses

MAX_OPEN = 100  # remembered collectives of one rank
MAX_NODES = 1_000  # in one search, and directly after one node
_KERNELS = (
    "kernels of {} communicators may wait for each other for ever; use one order on all ranks, or "
    "wait for one before the other"
)
_CREATION = (
    "the first call on a communicator creates it, and each host waits there until all its ranks "
    "have called, so these hang; "
)
_IN_ONE_ORDER = "make these calls in one order on all ranks"
_IN_BATCHES = "give the messages of each rank to one batch_isend_irecv"


class Node:
    """A collective or a new communicator, which is complete once all its ranks have reached it.

    Attributes:
        missing: Ranks that have not reached it yet.
        before: Unsettled nodes that a rank has to pass first.
        after: Nodes that come after it, each with an order that says so.
    """

    __slots__ = ("after", "before", "missing")

    def __init__(self, members: Iterable[int]) -> None:
        self.missing = {*members}
        self.before: set[Node] = set()
        self.after: dict[Node, Order] = {}

    @property
    def is_settled(self) -> bool:
        """True if it cannot be on a cycle."""
        return not (self.missing or self.before)

    def come(self, rank: int) -> None:
        """Note that a rank has reached this node, which may settle it, and then others."""
        self.missing.discard(rank)
        settled = [self] if self.is_settled else []
        while settled:
            node = settled.pop()
            for later in node.after:
                later.before.discard(node)
                if later.is_settled:
                    settled.append(later)
            node.after = {}

    def way_to(self, end: "Node") -> "list[Order]":
        """Return the orders on a shortest path to another node; [] if there is none."""
        ways: dict[Node, list[Order]] = {self: []}
        queue = deque([self])
        while queue and len(ways) < MAX_NODES:
            node = queue.popleft()
            for later, order in node.after.items():
                if later is end:
                    return [*ways[node], order]
                if later not in ways:
                    ways[later] = [*ways[node], order]
                    queue.append(later)
        return []


class Use(NamedTuple):
    """One rank's part in a node.

    Attributes:
        communicator: Identity of the communicator.
        stream: Stream on which it runs; None for the creation of a communicator, for which the host
            waits.
        number: Number of the work on the stream.
    """

    node: Node
    operation: Pending
    communicator: Communicator
    stream: Stream | None = None
    number: int = 0

    def is_passed(self, reached: Reached) -> bool:
        """Return whether a host or a stream that has reached this much comes after it."""
        return self.stream is None or reached.get(self.stream, 0) >= self.number

    def site(self, *, is_outer: bool) -> Site:
        """Return its line or, if ``is_outer``, the line that called a collective's function."""
        if is_outer and isinstance(self.operation, Attendance):
            return self.operation.caller
        return self.operation.site

    def text(self, names: GroupNames, *, is_outer: bool) -> str:
        """Return its name and line, such as ``barrier (call 1 of ranks 0-3) (train.py:9)``."""
        operation, group = self.operation, names.name(self.operation)
        name = operation.title()
        if isinstance(operation, Message):
            batch = "" if self.communicator.pair else "a batch with the "
            name = f"{batch}i{name} {operation.toward()}"
        return f"{name}{' on ' * bool(group)}{group} ({place(self.site(is_outer=is_outer))})"


class Order(NamedTuple):
    """One rank's order of two uses."""

    first: Use
    second: Use

    @property
    def rank(self) -> int:
        """The rank that has this order."""
        return self.first.operation.rank

    @property
    def is_of_one_line(self) -> bool:
        """True if both calls are on one line of a function that two lines call."""
        inner, outer = ({use.site(is_outer=of) for use in self} for of in (False, True))
        return len(inner) == 1 < len(outer)

    def places(self) -> tuple[int, Site, Site]:
        """Return the rank and the lines of both uses."""
        return self.rank, self.first.operation.site, self.second.operation.site


Cycle = list[Order]
Places = frozenset[tuple[int, Site, Site]]


@dataclass
class Orders:
    """The orders of all ranks, and the cycles that they form, one per set of lines."""

    _nodes: dict[object, Node] = field(default_factory=dict)
    _open: dict[int, list[Use]] = field(default_factory=dict)
    _cycles: dict[tuple[bool, Places], Cycle] = field(default_factory=dict)

    def launched(
        self,
        operation: Pending,
        communicator: Communicator,
        number: int,
        on: Stream,
        reached: Reached,
    ) -> None:
        """Note a collective that a rank puts on a communicator's stream.

        Args:
            number: Number of the collective in its group.
            reached: Numbers of the work that the collective comes after, by streams of its rank.
        """
        node = self._node((communicator, number), operation.group)
        use = Use(node, operation, communicator, on, on.reached[on])
        others = (u for u in self._unsettled(use) if u.communicator != communicator)
        self._come(use, [u for u in others if u.stream is None or not u.is_passed(reached)])

    def created(
        self,
        operation: Pending,
        communicator: Communicator,
        members: tuple[int, ...],
        host: Reached,
    ) -> None:
        """Note a rank's first use of a communicator, in which its host waits for all members.

        Args:
            host: Numbers of the work that the host has waited for, by streams.
        """
        use = Use(self._node(communicator, members), operation, communicator)
        self._come(use, [u for u in self._unsettled(use) if u.is_passed(host)])

    def _node(self, key: object, members: tuple[int, ...]) -> Node:
        node = self._nodes.setdefault(key, Node(members))
        if len(node.missing) == 1:  # the last rank is asking for it
            del self._nodes[key]
        return node

    def _unsettled(self, use: Use) -> list[Use]:
        before = self._open.get(use.operation.rank, ())
        return [u for u in before if not u.node.is_settled]

    def _come(self, use: Use, behind: Sequence[Use]) -> None:
        for earlier in behind:
            self._link(Order(earlier, use))
        use.node.come(use.operation.rank)
        uses = [*self._unsettled(use), use]
        calls = [u for u in uses if u.stream is not None]
        self._open[use.operation.rank] = [
            *(u for u in uses if u.stream is None),
            *calls[-MAX_OPEN:],
        ]

    def _link(self, order: Order) -> None:
        """Add an order to the graph, or note the cycle that it would close."""
        first, second = order.first.node, order.second.node
        if way := second.way_to(first):
            cycle = _from_lowest_rank([*way, order])
            self._cycles.setdefault((_is_of_hosts(cycle), _places(cycle)), cycle)
        elif second not in first.after and len(first.after) < MAX_NODES:
            first.after[second] = order
            second.before.add(first)

    def lines(self, made: Mapping[object, MadeGroup]) -> list[str]:
        """Return a line for each cycle.

        The first collective of a communicator also creates it. If the same calls form a cycle of
        creations, which is certain to hang, only that cycle is reported.
        """
        told: dict[Places, Cycle] = {}
        for (_, places), cycle in sorted(self._cycles.items(), key=lambda item: not item[0][0]):
            told.setdefault(places, cycle)
        return [_line(cycle, made) for cycle in told.values()]


def _from_lowest_rank(cycle: Cycle) -> Cycle:
    start = min(range(len(cycle)), key=lambda k: cycle[k].rank)
    return cycle[start:] + cycle[:start]


def _places(cycle: Cycle) -> Places:
    return frozenset(order.places() for order in cycle)


def _is_of_hosts(cycle: Cycle) -> bool:
    """Return whether a host waits in each order, so that the hang is certain."""
    return all(order.first.stream is None or order.second.stream is None for order in cycle)


def _line(cycle: Cycle, made: Mapping[object, MadeGroup]) -> str:
    is_of_hosts = _is_of_hosts(cycle)
    names = GroupNames((order.first.operation for order in cycle), made)
    is_outer = any(order.is_of_one_line for order in cycle)
    texts = [[use.text(names, is_outer=is_outer) for use in order] for order in cycle]
    verb = " calls" if is_of_hosts else " launches"
    orders = [
        f"rank {order.rank}{'' if k else verb} {first} before {second}"
        for k, (order, (first, second)) in enumerate(zip(cycle, texts, strict=True))
    ]
    if len(cycle) == 2 and not is_of_hosts:
        places = (place(use.site(is_outer=is_outer)) for use in cycle[1])
        orders[1] = f"rank {cycle[1].rank} the other way round ({', then '.join(places)})"
    return f"{clauses(orders)}: {_harm(cycle, is_of_hosts=is_of_hosts)}"


def _harm(cycle: Cycle, *, is_of_hosts: bool) -> str:
    """Return the consequence and the remedy."""
    if not is_of_hosts:
        return _KERNELS.format("two" if len(cycle) == 2 else len(cycle))
    are_messages = all(order.first.communicator.pair for order in cycle)
    return _CREATION + (_IN_BATCHES if are_messages else _IN_ONE_ORDER)
