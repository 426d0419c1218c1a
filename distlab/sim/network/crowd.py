"""Flows, and crowds: large sets of flows that share links, whose rates are computed in arrays.

    flow     bytes in transit over a route; see flows.py for route, link, rate and component
    crowd    a component of many flows, each of them a column in arrays of links, bytes and rates
    full     a link whose bandwidth its flows use up
    level    of a full link: bytes/s of the fastest flows on it. The rate of a flow is the lowest
             level among the links of its route

When one of the 4,032 flows of an all-to-all among 64 ranks ends, nearly all others get new rates.
Computing them one flow at a time would take 4,032 x 4,032 / 2 Python steps until the last flow has
ended. In a crowd, the end of a flow takes a few dozen array operations.
"""

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

TIE = 1 + 1e-12  # levels this close count as equal: equal flows must end at the same instant

Floats = npt.NDArray[np.float64]
Links = npt.NDArray[np.intp]  # numbers of links


class Flow:
    """Bytes in transit over one route.

    Attributes:
        links, num_bytes: Arguments of `Network.start`.
        crowd: Crowd that the flow is part of, or None. If there is one, only the crowd knows the
            flow's rate, since_s and remaining_bytes; finish_s is set only if the flow ends next.
        own_rate: Current bytes/s of a flow outside a crowd; 0 once the flow has ended.
        since_s, remaining_bytes: Time of the last change of the rate, and bytes left at that time.
        finish_s: Time at which the flow ends if rates no longer change.
        order: Number of the flow, in order of start.
        tag: Value for the caller to use.
    """

    __slots__ = (
        "crowd",
        "finish_s",
        "links",
        "num_bytes",
        "order",
        "own_rate",
        "remaining_bytes",
        "since_s",
        "tag",
    )

    def __init__(self, links: tuple[int, ...], num_bytes: float, now_s: float, order: int) -> None:
        self.links = links
        self.num_bytes = num_bytes
        self.remaining_bytes = num_bytes
        self.crowd: Crowd | None = None
        self.own_rate = 0.0
        self.since_s = now_s
        self.finish_s = inf
        self.order = order
        self.tag: Any = None

    @property
    def rate(self) -> float:
        """Current bytes/s; 0 before the first rate is computed and once the flow has ended."""
        return self.own_rate if self.crowd is None else self.crowd.rate(self)

    def __repr__(self) -> str:
        return f"Flow({self.num_bytes:g} bytes over {self.links}, {self.rate:g} bytes/s)"


class Crowd:
    """Many flows that share links; it computes their rates together and knows which end next.

    Every flow has a column in the arrays. For a flow over links 0 and 2, in a network of links 0 to
    3 and a crowd whose longest route has 3 links, the column holds:

        routes          0  2  4    link 4 is "nowhere", which never gets full
        left, since_s   5e6, 0.1   bytes left when the rate last changed, and that time
        rates, ends     1e9, 0.2   bytes/s now, and the time of the end at that rate

    The network adds and removes flows, and then asks once for new rates. If flows have ended but
    none have been added, rates below that of the slowest ended flow do not change: the links that
    limit them were not on the route of any ended flow.

    Args: bytes_per_s: Bandwidth of each link of the network.
    Cost: see `share`; 2 µs per flow added, and a copy of the arrays per call of `add`.
    """

    def __init__(self, bytes_per_s: Sequence[float]) -> None:
        self._bytes_per_s = np.array([*bytes_per_s, inf])
        self._nowhere = len(bytes_per_s)
        self._flows: list[Flow] = []  # the flow of each column, even if it has ended
        self._column: dict[Flow, int] = {}  # columns of the flows that have not ended
        self._routes: Links = np.empty((0, 0), dtype=np.intp)
        self._left: Floats = np.empty(0)  # infinity for flows that have ended
        self._since_s: Floats = np.empty(0)
        self._rates: Floats = np.empty(0)
        self._ends: Floats = np.empty(0)
        self._levels = np.full(len(bytes_per_s) + 1, inf)
        self._ended: list[int] = []  # columns of the flows that have ended since the last share
        self._floor = 0.0  # bound below which rates and levels do not change
        self._next: list[Flow] = []  # flows that end before all others

    def __len__(self) -> int:
        return len(self._column)

    @property
    def is_thin(self) -> bool:
        """True once half of the flows have ended; the rest may no longer share links."""
        return 2 * len(self._column) <= len(self._flows)

    def rate(self, flow: Flow) -> float:
        """Return the current bytes/s of ``flow``."""
        return float(self._rates[self._column[flow]])

    def add(self, flows: Collection[Flow]) -> None:
        """Add ``flows`` with their rates and remaining bytes."""
        self._add_routes([flow.links for flow in flows])
        self._left = np.append(self._left, [flow.remaining_bytes for flow in flows])
        self._since_s = np.append(self._since_s, [flow.since_s for flow in flows])
        self._rates = np.append(self._rates, [flow.own_rate for flow in flows])
        self._ends = np.append(self._ends, [flow.finish_s for flow in flows])
        for flow in flows:
            flow.crowd = self
            flow.finish_s = inf
            self._column[flow] = len(self._flows)
            self._flows.append(flow)
        self._floor = 0.0

    def remove(self, flow: Flow) -> None:
        """Remove ``flow``, which has ended."""
        self._ended.append(self._column.pop(flow))
        flow.crowd = None

    def disband(self) -> list[Flow]:
        """Copy rates and remaining bytes back to the flows that have not ended; return them."""
        for flow, column in self._column.items():
            flow.remaining_bytes = float(self._left[column])
            flow.since_s = float(self._since_s[column])
            flow.own_rate = float(self._rates[column])
            flow.finish_s = float(self._ends[column])
            flow.crowd = None
        return list(self._column)

    # The invariant between two calls of `share`: a column holds the bytes that its flow had left at
    # `since_s`, and a rate that has not changed since then. So nothing is updated until a rate
    # changes. Only the flows that end next have a finite `finish_s`: the network's heap holds one
    # instant per crowd. Flows with a rate below the floor are limited by links that no ended flow
    # has crossed (a new flow sets the floor to 0), so they keep exactly the same rates and ends.

    def share(self, now_s: float) -> list[Flow]:
        """Compute new rates; return the flows that end next, with `finish_s` set.

        Cost: `fill_links` for the flows whose rates may change, and about 30 operations on arrays
            of all flows, including ended ones: 0.1 ms for 100 of them, 2 ms for 16,000.
        """
        for flow in self._next:
            if flow.crowd is self:
                flow.finish_s = inf
        self._clear_ended()
        columns, rates = self._new_rates()
        sent = self._rates[columns] * (now_s - self._since_s[columns])
        remaining = np.maximum(0.0, self._left[columns] - sent)
        self._left[columns] = remaining
        self._since_s[columns] = now_s
        self._rates[columns] = rates
        self._ends[columns] = now_s + remaining / rates
        end_s = float(self._ends.min())
        self._next = [self._flows[column] for column in np.flatnonzero(self._ends == end_s)]
        for flow in self._next:
            flow.finish_s = end_s
        return self._next

    def _clear_ended(self) -> None:
        slowest = self._rates[self._ended].min(initial=inf)
        self._floor = min(self._floor, slowest / TIE)  # flows that tie with the slowest also change
        self._routes[:, self._ended] = self._nowhere
        self._left[self._ended] = self._ends[self._ended] = inf
        self._ended.clear()

    def _new_rates(self) -> tuple[Links, Floats]:
        """Return the columns of the flows whose rates change, and their new rates."""
        moving = np.flatnonzero((self._left < inf) & (self._rates >= self._floor))
        routes = self._routes.take(moving, axis=1)
        staying = self._rates.copy()
        staying[moving] = 0.0
        spare = self._bytes_per_s - _per_link(self._routes, staying, len(self._levels))
        self._levels[self._levels >= self._floor] = inf
        fill_links(routes, spare, self._levels)
        _even_out(self._levels)
        self._floor = inf  # no rate changes until a flow is added or ends
        rates = self._levels.take(routes).min(axis=0)
        changed = rates != self._rates[moving]
        return moving[changed], rates[changed]

    def _add_routes(self, routes: Collection[tuple[int, ...]]) -> None:
        width = max(len(self._routes), *map(len, routes))
        missing = ((0, width - len(self._routes)), (0, 0))
        wider = np.pad(self._routes, missing, constant_values=self._nowhere)
        padded = [route + (self._nowhere,) * (width - len(route)) for route in routes]
        self._routes = np.append(wider, np.array(padded, dtype=np.intp).T, axis=1)


def fill_links(routes: Links, spare: Floats, levels: Floats) -> None:
    """Raise the rates of all flows together until each has a full link; store the links' levels.

    This is `max_min_rates` of flows.py in fewer, larger steps. Each round fills every link that is
    the tightest link of all its flows. None of these flows is stopped earlier by another link,
    which would leave room on this one. For example, let links have 10, 4 and 9 bytes/s, and let
    flow a cross link 0, b links 0 and 1, c link 1, d and e link 2:

        round    link 0 offers    link 1 offers    link 2 offers
          1      5 to a, b        2 to b, c        4.5 to d, e      1 and 2 are full
          2      8 to a                                             0 is full

    Args:
        routes: Array of shape (links of the longest route, flows), a column per flow; see `Crowd`.
        spare: Array of shape (links + 1,): bytes/s that these flows may share. On return, it holds
            the bytes/s that are left over.
        levels: Array of shape (links + 1,), written for the links that get full.
    Cost: 30 µs per round, plus 15 ns per link of each flow that has no full link yet; at most one
        round per link. An unequal all-to-all takes 5 rounds on average for 64 ranks, 10 for 128.
    """
    growing = _per_link(routes, 1.0, len(spare))
    while routes.size:
        offers = _offers(spare, growing)
        offered = offers.take(routes)
        lowest = offered.min(axis=0)
        loose = _per_link(routes, offered > lowest * TIE, len(spare))
        tight = (loose == 0) & (growing > 0)
        levels[tight] = offers[tight]
        stops = tight.take(routes).any(axis=0)
        stopped, at = routes.compress(stops, axis=1), lowest.compress(stops)
        spare -= _per_link(stopped, at, len(spare))
        growing -= _per_link(stopped, 1.0, len(spare))
        routes = routes.compress(~stops, axis=1)


def _offers(spare: Floats, growing: Floats) -> Floats:
    """Return the level (bytes/s) at which each link fills up if none of its flows stops earlier."""
    offers = np.full(len(spare), inf)
    np.divide(spare, growing, out=offers, where=growing > 0)
    return offers


def _per_link(routes: Links, values: Floats | float, links: int) -> Floats:
    """Return, for each link, the sum of its flows' ``values`` (one per flow, or one for all)."""
    weights = np.empty(routes.shape)
    weights[:] = values
    return np.bincount(routes.ravel(), weights.ravel(), links).astype(np.float64, copy=False)


def _even_out(levels: Floats) -> None:
    """Set levels that differ only by rounding to the lowest of them."""
    full = np.flatnonzero(levels < inf)
    full = full[np.argsort(levels[full])]
    ascending = levels[full]
    differs = np.append(True, ascending[1:] > ascending[:-1] * TIE)
    levels[full] = ascending[differs][np.cumsum(differs) - 1]
