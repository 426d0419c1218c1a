"""Transfers between ranks: latency first, then bytes that share the links of their route."""

from collections.abc import Callable

from distlab.sim.cluster import Cluster
from distlab.sim.network import Flow, Network
from distlab.sim.scheduler import Scheduler


class Traffic:
    """The network as the scheduler sees it: a source of events, the arrivals.

    A transfer of n bytes over an idle route takes latency + n / bandwidth seconds, exactly.
    """

    def __init__(self, cluster: Cluster, scheduler: Scheduler) -> None:
        self.cluster = cluster
        self.network = Network([link.bytes_per_s for link in cluster.links])
        self._scheduler = scheduler
        self.next_event_s = self.network.next_finish_s
        scheduler.source = self

    def start(
        self,
        src: int,
        dst: int,
        num_bytes: float,
        now_s: float,
        arrived: Callable[[float], None],
        *,
        repeat: int = 1,
    ) -> None:
        """Send ``num_bytes`` from GPU ``src`` to GPU ``dst``; call ``arrived`` with the time.

        ``repeat`` such messages, each sent when the one before has arrived, are one transfer of
        all their bytes after all their latencies.
        """
        route = self.cluster.route(src, dst)
        begin_s = now_s + repeat * route.latency_s
        total_bytes = repeat * num_bytes
        if begin_s <= self._scheduler.now_s:
            self._enter(route.links, total_bytes, self._scheduler.now_s, arrived)
        else:
            self._scheduler.at(
                begin_s, lambda: self._enter(route.links, total_bytes, begin_s, arrived)
            )

    def _enter(
        self,
        links: tuple[int, ...],
        num_bytes: float,
        now_s: float,
        arrived: Callable[[float], None],
    ) -> None:
        self.network.start(links, num_bytes, now_s).tag = arrived

    def run_events(self, now_s: float) -> None:
        """Tell everyone whose bytes have arrived."""
        for flow in self.network.pop_finished(now_s):
            _arrived(flow)(now_s)


def _arrived(flow: Flow) -> Callable[[float], None]:
    tag = flow.tag
    if not callable(tag):
        raise TypeError(f"a flow carries {tag!r} instead of what to call on arrival")
    return tag
