"""The simulated machine: GPUs, links, and the route from each GPU to every other.

    cluster = Cluster.preset("dgx-h100", nodes=2)
    cluster.route(0, 8).latency_s                                # 1e-05
    [cluster.links[i].name for i in cluster.route(0, 8).links]   # ['node0.nic0.out',
                                                                 #  'node1.nic0.in']

A message of n bytes over an idle route takes latency_s + n / (bandwidth of its slowest link).
All bandwidths are bytes/s in one direction.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf
from typing import Any

from distlab.sim.hardware.presets import CLUSTERS, GPUS, PRESETS, Number, assumed
from distlab.sim.hardware.topology import TOPOLOGIES, Place, Shape, Topology
from distlab.util.text import unknown_name

__all__ = ["GPU", "PRESETS", "Cluster", "Link", "Route"]


@dataclass(frozen=True, eq=False)
class GPU:
    """Memory and speed of one GPU.

    Args:
        peak_flops: Dense FLOP/s from the data sheet, by dtype name ("bfloat16", "float16",
            "float32", "float64"). Utilisation (MFU) is relative to it.
        achievable_flops: FLOP/s that a large matmul actually reaches. Simulated times use it.
        protocol_efficiency: Fraction of the link bandwidth that each NCCL protocol reaches, by
            name; 1 for a protocol that is not listed.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]
    achievable_flops: Mapping[str, float]
    protocol_efficiency: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def preset(cls, name: str) -> "GPU":
        """Return a GPU from the table in presets.py, such as "H100-80GB"."""
        if name not in GPUS:
            raise unknown_name("GPU", name, GPUS)
        fields: dict[str, Any] = {}
        for key, number in GPUS[name].items():
            field_name, _, entry = key.partition(".")
            if entry:
                fields.setdefault(field_name, {})[entry] = number.value
            else:
                fields[field_name] = number.value
        return cls(name, **fields)

    def numbers(self) -> dict[str, float]:
        """Return all numbers by their names in the table, such as "peak_flops.float16"."""
        return {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            **{
                f"{name}.{entry}": value
                for name in ("peak_flops", "achievable_flops", "protocol_efficiency")
                for entry, value in getattr(self, name).items()
            },
        }


@dataclass(frozen=True)
class Link:
    """One direction of one cable or port."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True)
class Route:
    """Indices into `Cluster.links`, and the seconds until the first byte arrives."""

    links: tuple[int, ...]
    latency_s: float


@dataclass(frozen=True, eq=False)
class Cluster(Shape):
    """GPUs and the links between them.

        topology           inside a node               between nodes
        switch             one switch (NVSwitch)       NICs and one big switch
        rail-optimised     one switch                  NIC i of every node on rail i
        fat-tree           one switch                  leaf switches below a spine
        ethernet           PCIe                        one NIC per node and one big switch
        torus              a ring, the x axis          rings, the y axis

        numbering          4 GPUs on 2 nodes          GPU g is
        block              0 1 | 2 3                  number g % gpus_per_node of its node
        cyclic             0 2 | 1 3                  on node g % nodes

    Args:
        nodes, gpus_per_node: Number of nodes, and of GPUs on each. The GPUs of a node share a
            switch or host; an NVL72 rack is one node.
        gpu: GPU model, or None if computation takes no time and memory has no limit.
        nics_per_node: Number of NICs on each node, shared evenly by neighbouring GPUs. 0 for the
            default of the topology: one for ethernet, and one per GPU otherwise.
        nvlink_bytes_per_s: Bandwidth of one GPU inside its node, over NVLink (ethernet: over PCIe).
        nic_bytes_per_s: Bandwidth of one NIC.
        latency_s, net_latency_s: Latency of a message inside a node, and between nodes.
        hop_latency_s: Latency added by each relaying GPU and each switch beyond the first.
        oversubscription: In a fat-tree, the bandwidth of all NICs below a leaf switch divided by
            the bandwidth of the leaf's up-link.
        nodes_per_leaf: In a fat-tree, the number of nodes that share a leaf switch.
        switch_adds: True if the switch of a node sums the data of its GPUs (NVLS).
        network_adds: True if the switches between nodes also sum data (SHARP).
        numbering: Order of the GPUs, and hence of the ranks. "block" goes node by node; "cyclic"
            takes one GPU from each node, over and over. The names are from Slurm's --distribution.
        faults: (pattern, factor) of each `slowed` call that led to this cluster.
    Raises: ValueError: a value is invalid; the message says what is valid, in one line.
    """

    _: KW_ONLY
    topology: str = "switch"
    gpu: GPU | None = None
    latency_s: float = 5e-6
    net_latency_s: float = 10e-6
    hop_latency_s: float = 1e-6
    switch_adds: bool = False
    network_adds: bool = False
    numbering: str = "block"
    faults: tuple[tuple[str, float], ...] = ()
    name: str = "custom"
    _map: Topology = field(init=False, repr=False)
    _routes: dict[tuple[int, int], Route] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise unknown_name("topology", self.topology, TOPOLOGIES)
        if self.numbering not in NUMBERINGS:
            raise unknown_name("numbering", self.numbering, NUMBERINGS)
        if not self.nics_per_node:
            default = self.gpus_per_node if TOPOLOGIES[self.topology].nic_per_gpu else 1
            object.__setattr__(self, "nics_per_node", default)
        _check(self)
        object.__setattr__(self, "_map", TOPOLOGIES[self.topology](self))

    @classmethod
    def preset(cls, name: str, nodes: int = 1) -> "Cluster":
        """Return a cluster of ``nodes`` known machines, one of PRESETS, such as "dgx-h100".

        Raises: ValueError: there is no such preset; the message lists the valid names.
        Source: presets.py, for every number.
        """
        if name not in CLUSTERS:
            raise unknown_name("preset", name, PRESETS)
        preset = CLUSTERS[name]
        fields: dict[str, Any] = {
            key: field.value if isinstance(field, Number) else field
            for key, field in vars(preset).items()
        }
        fields["gpu"] = GPU.preset(preset.gpu) if preset.gpu else None
        return cls(nodes, name=name, **fields)

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @cached_property
    def links(self) -> list[Link]:
        """All links; routes refer to them by index."""
        links = []
        for name, bytes_per_s in self._map.links().items():
            for pattern, factor in self.faults:
                if fnmatchcase(name, pattern):
                    bytes_per_s /= factor
            links.append(Link(name, bytes_per_s))
        return links

    def node_of(self, gpu: int) -> int:
        """Return the node of GPU number ``gpu``."""
        return self.place_of(gpu).node

    def place_of(self, gpu: int) -> Place:
        """Return the place of GPU number ``gpu``.

        Raises: ValueError: there is no such GPU.
        """
        if not 0 <= gpu < self.num_gpus:
            raise ValueError(f"{self.name} has GPUs 0 to {self.num_gpus - 1}, not {gpu}")
        if self.numbering == "cyclic":
            number, node = divmod(gpu, self.nodes)
            return Place(node, number)
        return Place(*divmod(gpu, self.gpus_per_node))

    def by_node(self, gpus: Sequence[int]) -> list[list[int]]:
        """Group GPUs by node, in order of first appearance."""
        nodes: dict[int, list[int]] = {}
        for gpu in gpus:
            nodes.setdefault(self.node_of(gpu), []).append(gpu)
        return list(nodes.values())

    def route(self, src: int, dst: int) -> Route:
        """Return the route from GPU ``src`` to ``dst``; it has no links if both are the same."""
        route = self._routes.get((src, dst))
        if route is None:
            route = self._routes[src, dst] = self._find_route(
                self.place_of(src), self.place_of(dst)
            )
        return route

    def slowed(self, pattern: str, factor: float) -> "Cluster":
        """Return a copy in which all links whose names match ``pattern`` are slower.

            cluster.slowed("node3.nic0.*", 10)      # both directions, a tenth of the bandwidth

        Args:
            pattern: Shell-style pattern; `*` matches any text, `?` any character, `[12]` 1 or 2.
            factor: Divisor of the bandwidth, 1 or more.
        Raises: ValueError: no link matches; the message names some that exist.
        """
        if not 1 <= factor < inf:
            raise ValueError(f"slowed() divides by factor: expected 1 or more, got {factor}")
        names = [link.name for link in self.links]
        if not any(fnmatchcase(name, pattern) for name in names):
            some = difflib.get_close_matches(pattern, names, cutoff=0.0)
            raise ValueError(f"no link matches {pattern!r}; there are {', '.join(some)}, ...")
        return replace(self, faults=(*self.faults, (pattern, factor)))

    def assumptions(self) -> list[str]:
        """Return a line for every number that is assumed or was set by hand.

        Report these lines with every result: "simulated, preset dgx-h100, assuming: ...". If there
        is a single node, the numbers of the network are left out.
        """
        preset = CLUSTERS.get(self.name)
        used = _INSIDE if self.nodes == 1 else _INSIDE + _BETWEEN
        values = {key: getattr(self, key) for key in used}
        lines = _assumed_lines("", values, vars(preset) if preset else {})
        if self.gpu:
            lines += _assumed_lines("gpu.", self.gpu.numbers(), GPUS.get(self.gpu.name, {}))
        return lines

    @cached_property
    def _index(self) -> dict[str, int]:
        return {link.name: index for index, link in enumerate(self.links)}

    def _find_route(self, src: Place, dst: Place) -> Route:
        if src == dst:
            return Route((), 0.0)
        path = self._map.path(src, dst)
        base_s = self.latency_s if src.node == dst.node else self.net_latency_s
        links = tuple(self._index[name] for name in path.links)
        return Route(links, base_s + path.relays * self.hop_latency_s)


MAX_RANKS = 1024
NUMBERINGS = ("block", "cyclic")
_INSIDE = ("gpus_per_node", "nvlink_bytes_per_s", "latency_s", "hop_latency_s")
_BETWEEN = ("nics_per_node", "nic_bytes_per_s", "net_latency_s")


def _check(cluster: Cluster) -> None:
    for key in ("nodes", "gpus_per_node", "nics_per_node", "nodes_per_leaf", "oversubscription"):
        if getattr(cluster, key) < 1:
            raise ValueError(f"{key} must be 1 or more, got {getattr(cluster, key)}")
    for key in ("nvlink_bytes_per_s", "nic_bytes_per_s"):
        if not 0 < getattr(cluster, key) < inf:
            raise ValueError(f"{key} must be above 0 and finite, got {getattr(cluster, key)}")
    for key in ("latency_s", "net_latency_s", "hop_latency_s"):
        if not 0 <= getattr(cluster, key) < inf:
            raise ValueError(f"{key} must be 0 or more and finite, got {getattr(cluster, key)}")
    if cluster.gpus_per_node % cluster.nics_per_node:
        raise ValueError(
            f"{cluster.gpus_per_node} GPUs cannot share {cluster.nics_per_node} NICs evenly"
        )
    if cluster.topology != "fat-tree" and cluster.oversubscription * cluster.nodes_per_leaf != 1:
        raise ValueError(
            "oversubscription and nodes_per_leaf need topology='fat-tree', the only one with "
            f"shared up-links, not {cluster.topology!r}"
        )


def _assumed_lines(
    prefix: str, values: Mapping[str, float], known: Mapping[str, Number]
) -> list[str]:
    """Return a line for each value that is assumed in ``known``, or differs from ``known``."""
    lines = []
    for key, value in values.items():
        number = known.get(key)
        if number is None or number.value != value:
            number = assumed(value, "set by hand")
        if number.status == "assumed":
            lines.append(f"{prefix}{key} = {value:g} (assumed: {number.source})")
    return lines


def choose_cluster(cluster: Cluster | str | None, num_ranks: int) -> Cluster:
    """Return ``cluster``; if it is a preset's name or None, make one with a GPU for every rank.

    Raises:
        ValueError: the cluster has fewer GPUs than there are ranks, there is no preset of that
            name, or there are more ranks than can be simulated.
    """
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"a simulated world has 1 to {MAX_RANKS:,} ranks, got {num_ranks:,}: take fewer "
            "nodes or ranks"
        )
    if cluster is None:
        return Cluster(1, num_ranks)
    if isinstance(cluster, str):
        gpus_per_node = Cluster.preset(cluster).gpus_per_node
        return Cluster.preset(cluster, nodes=-(-num_ranks // gpus_per_node))
    if cluster.num_gpus < num_ranks:
        raise ValueError(
            f"{num_ranks} ranks need as many GPUs, but {cluster.name} has only {cluster.num_gpus}: "
            "use more nodes, or fewer ranks"
        )
    return cluster
