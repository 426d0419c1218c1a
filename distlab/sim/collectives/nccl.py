"""NCCL's algorithms: rings and double trees that use all NICs, and sums inside switches.

    channel    one of C copies of a ring or tree; each carries 1/C of the bytes, and enters and
               leaves a node through a different NIC, so that all NICs are busy
    hop        a message that waits for the one before it: over NVLink, or over the network
    pattern    the transfers of one byte of the buffer, and the hops of its longest path

The pieces of a buffer follow each other along every channel, so all hops are busy at the same time.
A collective takes the latency of its longest path plus the transfer time on its busiest link.

    collective       algorithm   each GPU sends, of n bytes            hops in nodes + network
    all_reduce       ring        2n(p-1)/p                             2(p-k) + 2(k-1)
                     tree        2n, along chains; a NIC 2n/C          2(g-1) + 2 lg k
                     nvls        n + n/g: the switch sums              2
                     nvls_tree   n + n/g; a NIC 2n/C                   2 + 2 lg k
                     collnet     n + n/g; a NIC n/C: switches sum      2 + 2
    all_gather,      ring        n(p-1)/p                              p-k + k-1
    reduce_scatter
    broadcast,       ring        n, a chain from the root              p-k + k-1
    reduce
    all_to_all       direct      n(p-1)/p, to all others at once       1
    scatter, gather  direct      n(p-1)/p from or to the root          1

There are p GPUs on k nodes of g each; lg is the base-2 logarithm, rounded up.
Source: NVIDIA/nccl, src/graph and src/device; Hu et al. 2025, arXiv 2507.04786.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise, product

from distlab.sim.collectives.phases import Transfer
from distlab.sim.hardware.cluster import Cluster

Nodes = Sequence[Sequence[int]]  # GPUs of each node; if there is a root, it comes first
Bytes = defaultdict[tuple[int, int], float]  # (src GPU, dst GPU) -> bytes
Travelling = tuple[list[Bytes], int, int]  # (rounds, hops inside nodes, hops between nodes)


@dataclass(frozen=True)
class Pattern:
    """The transfers that one byte of the whole buffer causes, and the hops on its longest path.

    Attributes:
        rounds: Transfers of each round; rounds follow each other without a pause. In a round, one
            transfer per pair of GPUs stands for all channels.
        hops, net_hops: Number of hops on the longest path, inside nodes and between them.
        cluster: Cluster that the GPUs belong to.
    """

    rounds: tuple[tuple[Transfer, ...], ...]
    hops: int
    net_hops: int
    cluster: Cluster

    @cached_property
    def loads(self) -> list[list[tuple[float, float]]]:
        """Seconds on each round's busiest links, as pairs.

        A pair holds the seconds for bytes that stay inside a node, and for bytes that leave it.
        """
        return [_busiest(transfers, self.cluster) for transfers in self.rounds]

    def seconds(self, efficiency: float = 1.0, net_efficiency: float = 1.0) -> float:
        """Return the seconds on the busiest links if these fractions of the sent bytes are data."""
        return sum(
            max(inside_s / efficiency + across_s / net_efficiency for inside_s, across_s in busiest)
            for busiest in self.loads
        )


def pattern(collective: str, algorithm: str, members: tuple[int, ...], cluster: Cluster) -> Pattern:
    """Return a collective's pattern; ``members`` are GPUs, starting with the root if there is one.

    Cost: 50 ms for 1024 GPUs, but only on the first call. An all_to_all, which has a million pairs
        of GPUs, takes seconds on every call.
    """
    is_large = collective == "all_to_all"  # one transfer per pair of GPUs: too many to cache
    find = _pattern.__wrapped__ if is_large else _pattern
    return find(collective, algorithm, members, cluster)


@lru_cache(maxsize=64)  # a training step repeats a few collectives of a few groups
def _pattern(
    collective: str, algorithm: str, members: tuple[int, ...], cluster: Cluster
) -> Pattern:
    travelling, hops, net_hops = _PATTERNS[collective][algorithm](cluster.by_node(members))
    rounds = tuple(
        tuple((src, dst, share) for (src, dst), share in of_round.items())
        for of_round in travelling
    )
    if collective in ("reduce", "gather"):
        rounds = tuple(
            tuple((dst, src, share) for src, dst, share in of_round) for of_round in rounds
        )
    return Pattern(rounds, hops, net_hops, cluster)


def algorithms(collective: str, members: Sequence[int], cluster: Cluster) -> list[str]:
    """Return the algorithms that NCCL offers for a collective on these GPUs.

    Sums in switches need the same number of GPUs on every node, and at least two.
    """
    sizes = {len(node) for node in cluster.by_node(members)}
    across = len(members) > max(sizes)
    can_add = cluster.switch_adds and len(sizes) == 1 and min(sizes) > 1
    possible = {
        "ring": True,
        "direct": True,
        "tree": across,
        "nvls": can_add and not across,
        "nvls_tree": can_add and across,
        "collnet": can_add and across and cluster.network_adds,
    }
    return [name for name in _PATTERNS[collective] if possible[name]]


def _busiest(transfers: Iterable[Transfer], cluster: Cluster) -> list[tuple[float, float]]:
    """Return the (inside, across) seconds of all links that no other link exceeds in both."""
    loads: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for src, dst, num_bytes in transfers:
        is_across = cluster.node_of(src) != cluster.node_of(dst)
        for link in cluster.route(src, dst).links:
            loads[link][is_across] += num_bytes / cluster.links[link].bytes_per_s
    busiest: list[tuple[float, float]] = []
    for inside_s, across_s in sorted({(a, b) for a, b in loads.values()}, reverse=True):
        if not busiest or across_s > busiest[-1][1]:
            busiest.append((inside_s, across_s))
    return busiest or [(0.0, 0.0)]


# Channel c enters a node at its c-th GPU, through the c-th NIC, and then visits the other GPUs:
#
#     channel 0    0 → 1 → 2 → 3 →  4 → 5 → 6 → 7 →  0        two nodes of four GPUs
#     channel 1    1 → 2 → 3 → 0 →  5 → 6 → 7 → 4 →  1


def _channels(nodes: Nodes) -> int:
    return min(map(len, nodes))


def _from(node: Sequence[int], c: int) -> list[int]:
    """Return the GPUs of a node, rotated to start at the c-th."""
    return [*node[c:], *node[:c]]


def _ring(nodes: Nodes, laps: int) -> Travelling:
    """Pass bytes along the rings: one lap for all-gather or reduce-scatter, two for all-reduce.

    Source: Patarasuk and Yuan 2009.
    """
    p, channels = sum(map(len, nodes)), _channels(nodes)
    travelling: Bytes = defaultdict(float)
    for c in range(channels):
        ring = list(chain.from_iterable(_from(node, c) for node in nodes))
        for pair in zip(ring, [*ring[1:], ring[0]], strict=True):
            travelling[pair] += laps * (p - 1) / p / channels
    return [travelling], laps * (p - len(nodes)), laps * (len(nodes) - 1)


def _broadcast(nodes: Nodes) -> Travelling:
    """Broadcast along a chain from the root; channel 0 leaves the root's node from the root."""
    (root, *neighbours), *other_nodes = nodes
    p, channels = sum(map(len, nodes)), _channels(nodes)
    travelling: Bytes = defaultdict(float)
    for c in range(channels):
        inside = [root, *_from(neighbours, c)]
        across = chain.from_iterable(_from(node, c) for node in other_nodes)
        leaving = inside[-1] if c else root
        for pair in chain(pairwise(inside), pairwise([leaving, *across])):
            travelling[pair] += 1 / channels
    return [travelling], p - len(nodes), len(nodes) - 1


def _tree(nodes: Nodes) -> Travelling:
    """All-reduce: sums go up a chain in every node and a tree across nodes, then back down."""
    channels = _channels(nodes)
    travelling, net_hops = _double_tree(nodes, channels)
    for c in range(channels):
        for node in nodes:
            for a, b in pairwise(_from(node, c)):
                _both_ways(travelling, a, b, 1 / channels)
    return [travelling], 2 * (max(map(len, nodes)) - 1), net_hops


def _nvls(nodes: Nodes) -> Travelling:
    """All-reduce in the switch, which sums the GPUs' data and copies the sums to all.

    The switch reads every GPU's data, gives each GPU a share of the sums, and then reads each share
    back to copy it to all GPUs. So every GPU sends and receives n + n/g bytes, which is modelled
    here as a ring of transfers over the GPUs' ports.
    """
    travelling: Bytes = defaultdict(float)
    for node in nodes:
        _around(travelling, node, 1 + 1 / len(node))
    return [travelling], 2, 0


def _nvls_tree(nodes: Nodes) -> Travelling:
    """All-reduce: a node's switch gives each GPU a share of the sums; trees sum across nodes."""
    (inside,), hops, _ = _nvls(nodes)
    across, net_hops = _double_tree(nodes, len(nodes[0]))
    return [defaultdict(float, inside | across)], hops, net_hops


def _collnet(nodes: Nodes) -> Travelling:
    """All-reduce: like ``nvls_tree``, but the network's switches sum across nodes (SHARP)."""
    (travelling,), hops, _ = _nvls(nodes)
    for column in zip(*nodes, strict=True):
        _around(travelling, column, 1 / len(nodes[0]))
    return [travelling], hops, 2


def _around(travelling: Bytes, gpus: Sequence[int], share: float) -> None:
    for pair in zip(gpus, _from(gpus, 1), strict=True):
        travelling[pair] += share


def _double_tree(nodes: Nodes, channels: int) -> tuple[Bytes, int]:
    """Return the transfers of two trees across nodes, and the number of hops.

    Each tree carries half of the bytes. Inner nodes of one tree are leaves of the other, so all
    nodes send the same number of bytes.
    Source: Sanders, Speck and Träff 2009.
    """
    travelling: Bytes = defaultdict(float)
    parents = tree_parents(len(nodes))
    for tree in (parents, other_tree(parents)):
        for node, parent in enumerate(tree):
            if parent >= 0:
                for c in range(channels):
                    _both_ways(travelling, nodes[node][c], nodes[parent][c], 1 / 2 / channels)
    return travelling, 2 * max(depth(parents, node) for node in range(len(nodes)))


def _both_ways(travelling: Bytes, a: int, b: int, share: float) -> None:
    travelling[a, b] += share
    travelling[b, a] += share


def _all_to_all(nodes: Nodes) -> Travelling:
    """All-to-all: one round for each distance between nodes, so that all NICs are busy.

    Bytes that stay inside a node travel during the first round.
    """
    p, k = sum(map(len, nodes)), len(nodes)
    rounds: list[Bytes] = [defaultdict(float) for _ in range(k)]
    for distance, travelling in enumerate(rounds):
        for i, node in enumerate(nodes):
            for pair in product(node, nodes[(i + distance) % k]):
                if pair[0] != pair[1]:
                    travelling[pair] = 1 / p
    if k > 1:
        rounds[1].update(rounds.pop(0))
    return rounds, int(k == 1), int(k > 1)


def _scatter(nodes: Nodes) -> Travelling:
    """Scatter: the root sends all shares at the same time."""
    root, *receivers = chain.from_iterable(nodes)
    share = 1 / (len(receivers) + 1)
    travelling: Bytes = defaultdict(float, {(root, gpu): share for gpu in receivers})
    return [travelling], int(len(nodes) == 1), int(len(nodes) > 1)


_LAP: Mapping[str, Callable[[Nodes], Travelling]] = {"ring": lambda nodes: _ring(nodes, laps=1)}
_CHAIN: Mapping[str, Callable[[Nodes], Travelling]] = {"ring": _broadcast}
_SCATTER: Mapping[str, Callable[[Nodes], Travelling]] = {"direct": _scatter}
_PATTERNS: Mapping[str, Mapping[str, Callable[[Nodes], Travelling]]] = {
    "all_reduce": {
        "ring": lambda nodes: _ring(nodes, laps=2),
        "tree": _tree,
        "nvls": _nvls,
        "nvls_tree": _nvls_tree,
        "collnet": _collnet,
    },
    "all_gather": _LAP,
    "reduce_scatter": _LAP,
    "broadcast": _CHAIN,
    "reduce": _CHAIN,
    "scatter": _SCATTER,
    "gather": _SCATTER,
    "all_to_all": {"direct": _all_to_all},
}


def tree_parents(k: int) -> list[int]:
    """Return the parent of each of k nodes, or -1 for the root; odd nodes are leaves.

    k = 8:   0 ── 4 ─┬─ 2 ─┬─ 1
                     │     └─ 3          [-1, 2, 4, 2, 0, 6, 4, 6]
                     └─ 6 ─┬─ 5
                           └─ 7
    """
    parents = [-1]
    for node in range(1, k):
        bit = node & -node
        parent = (node ^ bit) | 2 * bit
        parents.append(parent if parent < k else node ^ bit)
    return parents


def other_tree(parents: Sequence[int]) -> list[int]:
    """Return a second tree, whose inner nodes are leaves of the first.

    It is the mirror image of the first tree or, if k is odd, the first tree shifted by one node.
    """
    k = len(parents)
    new_parents = [-1] * k
    for node, parent in enumerate(parents):
        if parent >= 0:
            new, above = (k - 1 - node, k - 1 - parent) if k % 2 == 0 else (node + 1, parent + 1)
            new_parents[new % k] = above % k
    return new_parents


def depth(parents: Sequence[int], node: int) -> int:
    """Return the number of steps from a node to the root."""
    return 0 if parents[node] < 0 else 1 + depth(parents, parents[node])
