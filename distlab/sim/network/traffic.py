"""Transfers between ranks: latency first, then bytes that share the links of their route."""

import heapq
from collections.abc import Callable
from itertools import count

from distlab.sim.engine.faults import Faults
from distlab.sim.engine.scheduler import NEVER, Scheduler
from distlab.sim.engine.trace import Trace
from distlab.sim.hardware.cluster import Cluster
from distlab.sim.network.flows import Network

# Start time, order among transfers that start together, links, bytes, callback for the arrival.
Transfer = tuple[float, int, tuple[int, ...], float, Callable[[float], None]]


class Traffic:
    """The network as the scheduler sees it: a source of arrival events.

    A transfer of n bytes over an idle route takes exactly latency + n / bandwidth seconds.

    Attributes:
        next_event_s: Time at which the next latency is over or the next bytes have arrived.
    """

    def __init__(
        self, cluster: Cluster, scheduler: Scheduler, trace: Trace, faults: Faults
    ) -> None:
        self.cluster = cluster
        self.network = Network([link.bytes_per_s for link in cluster.links])
        trace.bytes_by_link = self.network.bytes_by_link
        self._scheduler = scheduler
        self._trace = trace
        self._delays_s = faults.delays_s
        self._waiting: list[Transfer] = []  # heap of transfers whose latency is not over
        self._order = count()
        self.next_event_s = NEVER
        scheduler.source = self

    def carry(
        self,
        src: int,
        dst: int,
        num_bytes: float,
        now_s: float,
        arrived: Callable[[float], None],
        *,
        repeat: int = 1,
        latency_s: float | None = None,
        bytes_on_links: float | None = None,
    ) -> None:
        """Send ``num_bytes`` from GPU ``src`` to ``dst``; call ``arrived`` with the arrival time.

        If ``repeat`` is above 1, that many messages are sent, each when the previous one has
        arrived. They are simulated as one transfer: first all latencies and delays, then all bytes.

        Args:
            latency_s: Latency of each message; None for the latency of the route.
            bytes_on_links: Bytes of each message with its protocol flags; None if it has no flags.
        """
        route, total = self.cluster.route(src, dst), repeat * num_bytes
        self._trace.carried(src, dst, total, repeat)
        if latency_s is None:
            latency_s = route.latency_s
        if self._delays_s:
            latency_s += self._delays_s.get((src, dst), 0.0)
        begin_s = now_s + repeat * latency_s
        if begin_s < self._scheduler.now_s:
            begin_s = self._scheduler.now_s
        carried = total if bytes_on_links is None else repeat * bytes_on_links
        transfer = (begin_s, next(self._order), route.links, carried, arrived)
        heapq.heappush(self._waiting, transfer)
        if begin_s < self.next_event_s:
            self.next_event_s = begin_s

    def run_events(self, now_s: float) -> None:
        """Start transfers that are due, and call the callbacks of those that have arrived."""
        waiting, network = self._waiting, self.network
        while waiting and waiting[0][0] <= now_s:
            _, _, links, num_bytes, arrived = heapq.heappop(waiting)
            network.start(links, num_bytes, now_s).tag = arrived
        for flow in network.pop_finished(now_s):
            flow.tag(now_s)
        end_s = network.next_finish_s()
        begin_s = waiting[0][0] if waiting else NEVER
        self.next_event_s = min(begin_s, end_s)
