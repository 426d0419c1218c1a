"""NCCL's protocols, and its choice of an algorithm and a protocol for each size.

    LL        a flag beside every 4 bytes of data: short hops, little bandwidth
    LL128     a flag in every 128 bytes: short hops, most of the bandwidth
    Simple    pieces of up to 512 KiB, each with a flag: long hops, all of the bandwidth
    NVLS      Simple, with sums in the node's switch
    SHARP     NVLS, with sums in the network's switches as well
    P2P       Simple, between all pairs at once: all_to_all, scatter, gather

A collective of n bytes takes

    launch + hops · hop + network hops · network hop + n · seconds / efficiency

where the number of hops and the seconds (per byte, on the busiest link) depend on the pattern, and
everything else depends on the protocol. A protocol's efficiency differs between bytes that stay
inside a node and bytes that leave it. As in NCCL's tuner, the cheapest combination of algorithm and
protocol is used.

Source: NVIDIA/nccl, src/graph/tuning.cc, for the formula; the numbers are fitted (see presets.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.sim.collectives import nccl
from distlab.sim.collectives.phases import Phase, Phases, Transfer
from distlab.sim.hardware.cluster import Cluster
from distlab.sim.hardware.presets import PROTOCOLS, Protocol

OF_ALGORITHM = {
    "ring": ("LL", "LL128", "Simple"),
    "tree": ("LL", "LL128", "Simple"),
    "nvls": ("NVLS",),
    "nvls_tree": ("NVLS",),
    "collnet": ("SHARP",),
    "direct": ("P2P",),
}


@dataclass(frozen=True)
class Way:
    """One way to run a collective: an algorithm with a protocol."""

    num_bytes: float
    algorithm: str
    protocol: str
    latency_s: float
    efficiency: float
    net_efficiency: float
    pattern: nccl.Pattern

    @property
    def seconds(self) -> float:
        """Duration of the collective if nothing else is on the links."""
        bytes_s = self.pattern.seconds(self.efficiency, self.net_efficiency)
        return self.latency_s + self.num_bytes * bytes_s


def plan(
    collective: str, algorithm: str, members: Sequence[int], num_bytes: float, cluster: Cluster
) -> Phases:
    """Return a collective's phases as NCCL runs them; the first includes all of the latency.

        plan("all_reduce", "auto", range(8), 2**30, Cluster.preset("dgx-h100"))
            one phase: each GPU sends and gets 1.125 GiB via the switch, at 77 % of its bandwidth

    Args:
        algorithm: "auto" for the cheapest, or a key of OF_ALGORITHM. If NCCL lacks that algorithm
            for this collective, the first one that it has is used.
        members: GPUs of the group; if there is a root, it comes first.
        num_bytes: Size, with the same meaning as in `algorithms.plan`.
    """
    if len(members) == 1:
        return []
    way = cheapest(collective, algorithm, members, num_bytes, cluster)
    latencies_s = [way.latency_s] + [0.0] * (len(way.pattern.rounds) - 1)
    return [
        _phase(transfers, latency_s, num_bytes, way, cluster)
        for transfers, latency_s in zip(way.pattern.rounds, latencies_s, strict=True)
    ]


def _phase(
    transfers: Sequence[Transfer], latency_s: float, num_bytes: float, way: Way, cluster: Cluster
) -> Phase:
    scaled = tuple((src, dst, share * num_bytes) for src, dst, share in transfers)
    on_links = tuple(
        size
        / (way.efficiency if cluster.node_of(src) == cluster.node_of(dst) else way.net_efficiency)
        for src, dst, size in scaled
    )
    return Phase(scaled, latency_s=latency_s, bytes_on_links=on_links)


def cheapest(
    collective: str, algorithm: str, members: Sequence[int], num_bytes: float, cluster: Cluster
) -> Way:
    """Return the way that NCCL's tuner chooses, limited to ``algorithm`` unless it is "auto"."""
    if collective.endswith("barrier"):  # torch runs a barrier as an all-reduce of one number
        collective = "all_reduce"
    names = nccl.algorithms(collective, members, cluster)
    if algorithm != "auto":
        names = [algorithm] if algorithm in names else names[:1]
    ways = [
        _way(collective, name, protocol, members, num_bytes, cluster)
        for name in names
        for protocol in OF_ALGORITHM[name]
    ]
    return ways[0] if len(ways) == 1 else min(ways, key=lambda way: way.seconds)


def _way(
    collective: str,
    algorithm: str,
    name: str,
    members: Sequence[int],
    num_bytes: float,
    cluster: Cluster,
) -> Way:
    protocol = PROTOCOLS[name]
    pattern = nccl.pattern(collective, algorithm, tuple(members), cluster)
    efficiency = cluster.gpu.protocol_efficiency.get(name, 1.0) if cluster.gpu else 1.0
    if algorithm == "tree":
        efficiency *= protocol.in_trees.value
    return Way(
        num_bytes,
        algorithm,
        name,
        latency_s(protocol, pattern, cluster),
        efficiency,
        protocol.net_efficiency.value,
        pattern,
    )


def latency_s(protocol: Protocol, pattern: nccl.Pattern, cluster: Cluster) -> float:
    """Return the latency of the longest path in seconds: the launch and the hops, but no bytes."""
    hops_s = pattern.hops * protocol.hop.value * cluster.latency_s
    net_hops_s = pattern.net_hops * protocol.net_hop.value * cluster.net_latency_s
    return protocol.launch_s.value + hops_s + net_hops_s
