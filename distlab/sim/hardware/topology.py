"""The links of a cluster, and the path of a message over them: names and bandwidths only.

    node    the GPUs that share an NVLink switch, or a host
    port    a GPU's connection to the switch of its node, in one direction
    NIC     a node's connection to the other nodes
    relay   a GPU that passes bytes on, or a switch beyond the first

A cable carries both directions at full speed, so each direction is a separate link:
`node0.gpu3.out` and `node0.gpu3.in`. Switches themselves are never the bottleneck.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """The position of a GPU: the number of its node, and its number inside that node."""

    node: int
    gpu: int


class Path(NamedTuple):
    """The path from one GPU to another: the names of its links, and its number of relays."""

    links: tuple[str, ...]
    relays: int = 0


@dataclass(frozen=True, eq=False)
class Shape:
    """Sizes and speeds that all topologies need; see `cluster.Cluster` for the fields."""

    nodes: int = 1
    gpus_per_node: int = 8
    _: KW_ONLY
    nics_per_node: int = 0
    nvlink_bytes_per_s: float = 300e9
    nic_bytes_per_s: float = 25e9
    oversubscription: float = 1.0
    nodes_per_leaf: int = 1


class Switch:
    """One switch in every node, and one big switch between the nodes.

        node 0   gpu0 ── NVSwitch ── gpu1      gpu0 to gpu1: node0.gpu0.out, node0.gpu1.in
                 nic0                nic1
                    └──── switch ────┘         gpu0 to gpu1 of node 1: node0.nic0.out,
                 nic0                nic1                              node1.nic1.in
        node 1   gpu0 ── NVSwitch ── gpu1

    A GPU reaches its NIC without crossing the node's switch, so the GPU's ports stay free.
    """

    nic_per_gpu = True  # default: one NIC per GPU, not one per node

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def links(self) -> dict[str, float]:
        """Return the bandwidth of every link in bytes/s, by name."""
        shape = self.shape
        links: dict[str, float] = {}
        for node in range(shape.nodes):
            for gpu in range(shape.gpus_per_node):
                links |= _duplex(f"node{node}.gpu{gpu}", shape.nvlink_bytes_per_s)
            if shape.nodes > 1:
                for nic in range(shape.nics_per_node):
                    links |= _duplex(f"node{node}.nic{nic}", shape.nic_bytes_per_s)
        return links

    def path(self, src: Place, dst: Place) -> Path:
        """Return the path from ``src`` to ``dst``, two different GPUs."""
        return self._inside(src, dst) if src.node == dst.node else self._between(src, dst)

    def _inside(self, src: Place, dst: Place) -> Path:
        return Path((f"{_gpu(src)}.out", f"{_gpu(dst)}.in"))

    def _between(self, src: Place, dst: Place) -> Path:
        return Path((f"{self._nic(src)}.out", f"{self._nic(dst)}.in"))

    def _nic(self, place: Place) -> str:
        # 8 GPUs, 4 NICs: GPUs 0 and 1 share NIC 0, GPUs 2 and 3 NIC 1, ...
        number = place.gpu * self.shape.nics_per_node // self.shape.gpus_per_node
        return f"node{place.node}.nic{number}"


class Ethernet(Switch):
    """GPUs on PCIe, and one NIC for all of them; bytes to another node also cross PCIe.

    gpu0 ──┐                                 ┌── gpu0     gpu0 to gpu1 of node 1: gpu0.out,
    gpu1 ──┴── nic0 ─── switch ─── nic0 ─────┴── gpu1     nic0.out, nic0.in, gpu1.in
    """

    nic_per_gpu = False

    def _between(self, src: Place, dst: Place) -> Path:
        links = super()._between(src, dst).links
        return Path((f"{_gpu(src)}.out", *links, f"{_gpu(dst)}.in"))


class RailOptimised(Switch):
    """NIC i of every node is on rail i, a leaf switch; the rails are not connected.

        node 0   gpu0 ── gpu1        gpu0 to gpu0 of node 1: over rail 0
                 nic0    nic1        gpu0 to gpu1 of node 1: over NVLink to gpu1 of its own
        rail       0       1             node, which relays over rail 1
                 nic0    nic1
        node 1   gpu0 ── gpu1

    Source: NVIDIA's blog on NCCL 2.12, which calls it PXN: a GPU uses its neighbour's NIC.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if shape.nics_per_node != shape.gpus_per_node:
            raise ValueError(
                f"rail-optimised needs one NIC per GPU, got {shape.nics_per_node} NICs "
                f"for {shape.gpus_per_node} GPUs"
            )

    def _between(self, src: Place, dst: Place) -> Path:
        neighbour = Place(src.node, dst.gpu)
        rail = super()._between(neighbour, dst)
        if neighbour == src:
            return rail
        return Path(self._inside(src, neighbour).links + rail.links, relays=1)


class FatTree(Switch):
    """Nodes are connected to leaf switches, and leaf switches to a spine by shared up-links.

           ┌─── spine ───┐           leaf0.up, leaf1.down: NICs below / oversubscription
         leaf0         leaf1
        ╱     ╲       ╱     ╲        between two leaves, bytes pass two more switches
    node0  node1   node2  node3      (nodes_per_leaf = 2)
    """

    def links(self) -> dict[str, float]:
        shape = self.shape
        below = shape.nodes_per_leaf * shape.nics_per_node * shape.nic_bytes_per_s
        links = super().links()
        if self._leaf(shape.nodes - 1) > 0:
            for leaf in range(self._leaf(shape.nodes - 1) + 1):
                up = below / shape.oversubscription
                links |= {f"leaf{leaf}.up": up, f"leaf{leaf}.down": up}
        return links

    def _between(self, src: Place, dst: Place) -> Path:
        out, into = super()._between(src, dst).links
        source, target = self._leaf(src.node), self._leaf(dst.node)
        if source == target:
            return Path((out, into))
        return Path((out, f"leaf{source}.up", f"leaf{target}.down", into), relays=2)

    def _leaf(self, node: int) -> int:
        return node // self.shape.nodes_per_leaf


class Torus:
    """Every GPU is wired to four neighbours, and both axes close into rings.

        x: along a node, gpus_per_node GPUs, NVLink      y: across the nodes, over NICs

        ─ 0,0 ─ 0,1 ─ 0,2 ─         node, gpu
           │     │     │            0,0 -> 1,2: first along x, the shorter way round (left),
        ─ 1,0 ─ 1,1 ─ 1,2 ─         then along y; every GPU on the way relays

    If both ways round are equally long, bytes go towards higher numbers. An axis of two GPUs has a
    single cable.
    Source: Dally and Towles, Principles and Practices of Interconnection Networks, section 8.4
    (dimension-order routing).
    """

    nic_per_gpu = True

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def links(self) -> dict[str, float]:
        """Return the bandwidth of every link in bytes/s, by name."""
        shape = self.shape
        x = _directions("x", shape.gpus_per_node, shape.nvlink_bytes_per_s)
        y = _directions("y", shape.nodes, shape.nic_bytes_per_s)
        return {
            f"{_gpu(Place(node, gpu))}.{direction}": bytes_per_s
            for node in range(shape.nodes)
            for gpu in range(shape.gpus_per_node)
            for direction, bytes_per_s in (x | y).items()
        }

    def path(self, src: Place, dst: Place) -> Path:
        """Return the path from ``src`` to ``dst``, two different GPUs."""
        shape = self.shape
        along_x = [
            f"{_gpu(Place(src.node, gpu))}.x{sign}"
            for gpu, sign in _walk(src.gpu, dst.gpu, shape.gpus_per_node)
        ]
        along_y = [
            f"{_gpu(Place(node, dst.gpu))}.y{sign}"
            for node, sign in _walk(src.node, dst.node, shape.nodes)
        ]
        links = (*along_x, *along_y)
        return Path(links, relays=len(links) - 1)


Topology = Switch | Torus

TOPOLOGIES: dict[str, type[Topology]] = {
    "switch": Switch,
    "rail-optimised": RailOptimised,
    "fat-tree": FatTree,
    "torus": Torus,
    "ethernet": Ethernet,
}


def _duplex(name: str, bytes_per_s: float) -> dict[str, float]:
    return {f"{name}.out": bytes_per_s, f"{name}.in": bytes_per_s}


def _gpu(place: Place) -> str:
    return f"node{place.node}.gpu{place.gpu}"


def _directions(axis: str, size: int, bytes_per_s: float) -> dict[str, float]:
    signs = "+-" if size > 2 else "+" if size == 2 else ""
    return {f"{axis}{sign}": bytes_per_s for sign in signs}


def _walk(start: int, end: int, size: int) -> Iterator[tuple[int, str]]:
    """Yield the start and direction of each hop: 0 to 3 on a ring of 4 is one hop, (0, "-")."""
    ahead = (end - start) % size
    up = ahead <= size - ahead
    for hop in range(ahead if up else size - ahead):
        yield (start + hop if up else start - hop) % size, "+" if up else "-"
