"""The transfers of the built-in collectives, and the time that they take.

If a collective lacks the chosen algorithm, the first one in its row is used. Times are for p equal
GPUs with unshared links. A message takes α seconds, plus β per byte; n is the size of the whole
buffer in bytes, and lg the base-2 logarithm, rounded up.

    collective       algorithm            seconds
    all_reduce       ring                 2(p-1)α + 2n(p-1)/p β
                     tree                 2 lg p (α + nβ)
                     recursive_doubling   lg p (α + nβ)                     (p = 2^k)
                     halving_doubling     2 lg p α + 2n(p-1)/p β            (p = 2^k)
                     hierarchical         ring inside the nodes, ring across them; see below
    broadcast,       tree                 lg p (α + nβ)
    reduce           ring                 (lg p + p-1)α + 2n(p-1)/p β
                     halving_doubling     2 lg p α + 2n(p-1)/p β
                     hierarchical         a tree across the nodes, then one inside each
    all_gather,      ring                 (p-1)α + n(p-1)/p β
    reduce_scatter   recursive_doubling   lg p α + n(p-1)/p β               (also halving_doubling)
                     hierarchical         ring inside the nodes, ring across them
    scatter,         tree                 lg p α + n(p-1)/p β
    gather           direct               (p-1)α + n(p-1)/p β
    all_to_all       direct               (p-1)α + n(p-1)/p β
                     recursive_doubling   lg p α + (n/2) lg p β             (p = 2^k; Bruck)
    barrier          recursive_doubling   lg p α     (dissemination; also monitored_barrier)

Where the table says p = 2^k, see `patterns` for other p. Additions take no time. The "hierarchical"
algorithms need the same number of ranks on every node of the group; otherwise the first algorithm
in the row is used. The steps of "hierarchical" run one after another. In "hierarchical_overlapped",
all steps run at the same time, on different pieces of the buffer, so the slowest step determines
the time.

These are textbook algorithms. The names of NCCL's own algorithms begin with "nccl_"; see `nccl`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

from distlab.sim.collectives import protocols
from distlab.sim.collectives.patterns import (
    bruck_all_to_all,
    dissemination,
    doubling_all_gather,
    doubling_all_reduce,
    doubling_broadcast,
    halving_doubling_all_reduce,
    one_by_one,
    pairwise,
    ring,
    ring_broadcast,
    ring_twice,
    tree_all_reduce,
    tree_broadcast,
    tree_scatter,
)
from distlab.sim.collectives.phases import (
    Phase,
    Phases,
    mirrored,
    overlapped,
    round_s,
    together,
)
from distlab.sim.hardware.cluster import Cluster

__all__ = ["ALGORITHMS", "COLLECTIVES", "Phase", "plan", "plan_uneven"]

Members = Sequence[int]  # GPUs in order of position, starting with the root
Nodes = Sequence[Members]  # equally many members per node; the root comes first
M = TypeVar("M", Members, Nodes)
NCCL = "nccl_"


def plan(
    collective: str,
    algorithm: str,
    gpus: Sequence[int],
    num_bytes: float,
    cluster: Cluster,
    *,
    root: int = 0,
) -> list[Phase]:
    """Return the transfers of a collective, phase by phase; a group of one has none.

        plan("all_reduce", "ring", [4, 5, 6, 7], 1000, cluster)
            one phase, 6 times: 4→5, 5→6, 6→7 and 7→4, 250 bytes each

    Args:
        collective, algorithm: Names from the table of this module. On GPUs whose
            `protocol_efficiency` is known, "auto" is NCCL's choice (see `protocols`). On other
            GPUs, it is the fastest plan from the table, timed by `round_s` with shared links; ties
            go to the plan with the fewest transfers.
        gpus: GPUs of the group's ranks, in ring order.
        num_bytes: Bytes of the tensor (all_reduce, reduce, broadcast), of all shards together
            (all_gather, reduce_scatter), of all that the root sends or receives (scatter, gather),
            or of all that one rank sends (all_to_all). The last two include a rank's share for
            itself. 0 for a barrier.
        root: Index into ``gpus``, for reduce, broadcast, scatter and gather.

    Cost: For 1024 GPUs, below 1 ms for a ring or a tree, 3 ms for lg p rounds that keep all members
        busy, 0.1 s for "auto" once the cluster has cached its routes, and 0.4 s for a direct
        all_to_all, which has p(p-1) transfers.
    """
    members = [*gpus[root:], *gpus[:root]]
    has_nccl = cluster.gpu is not None and bool(cluster.gpu.protocol_efficiency)
    if algorithm.startswith(NCCL) or (algorithm == "auto" and has_nccl):
        name = algorithm.removeprefix(NCCL)
        return protocols.plan(collective, name, members, num_bytes, cluster)
    if algorithm != "auto":
        return _plan(collective, algorithm, members, num_bytes, cluster)
    plans = [pattern(members, num_bytes) for pattern in dict.fromkeys(_FLAT[collective].values())]
    if collective in _HIERARCHICAL:
        plans.append(_plan(collective, "hierarchical", members, num_bytes, cluster))
    return plans[0] if len(plans) == 1 else _fastest(plans, cluster)


def plan_uneven(
    collective: str, algorithm: str, gpus: Sequence[int], sizes: Sequence[int], cluster: Cluster
) -> list[Phase]:
    """Return the transfers of an all_gather or reduce_scatter of a list with different sizes.

    NCCL has no such collective. torch launches a broadcast from each rank, or a reduce to each, as
    a group, whose kernels run at the same time.

    Args:
        sizes: Bytes of each rank's part.
    """
    name = {"all_gather": "broadcast", "reduce_scatter": "reduce"}[collective]
    plans = [
        plan(name, algorithm, gpus, num_bytes, cluster, root=root)
        for root, num_bytes in enumerate(sizes)
    ]
    return overlapped(plans, cluster)


def _fastest(plans: Iterable[Phases], cluster: Cluster) -> Phases:
    """Return the fastest plan; stop timing a plan once it takes as long as the best one so far."""
    best: Phases = []
    best_s = inf
    for phases in sorted(plans, key=lambda phases: sum(len(phase.transfers) for phase in phases)):
        elapsed_s = 0.0
        for phase in phases:
            elapsed_s += phase.repeat * round_s(phase, cluster, shared=True)
            if elapsed_s >= best_s:
                break
        else:
            best, best_s = phases, elapsed_s
    return best


def _plan(
    collective: str, algorithm: str, members: Members, num_bytes: float, cluster: Cluster
) -> list[Phase]:
    if algorithm.startswith("hierarchical") and collective in _HIERARCHICAL:
        nodes = cluster.by_node(members)
        if len({len(node) for node in nodes}) == 1:
            phases = _HIERARCHICAL[collective](nodes, num_bytes)
            return overlapped([phases], cluster) if algorithm.endswith("overlapped") else phases
    row = _FLAT[collective]
    natural = next(iter(row.values()))
    return row.get(algorithm, natural)(members, num_bytes)


# Two levels. A node is a row, and the j-th members of all nodes are a column:
#
#     node 0    0  1  2  3        inside a node:    rows, in parallel
#     node 1    4  5  6  7        across nodes:     columns, in parallel
#
# In the costs, α₁ and β₁ apply inside a node, α₂ and β₂ across nodes.


def _hierarchical_all_reduce(nodes: Nodes, n: float) -> Phases:
    """All-reduce: reduce-scatter in every row, all-reduce in every column, all-gather in every row.

    Cost: For k nodes of g GPUs, 2(g-1)α₁ + 2n(g-1)/g β₁ + 2(k-1)α₂ + 2(n/g)(k-1)/k β₂.
    Source: The 2-D torus all-reduce of Mikami et al. 2018, arXiv 1811.05233.
    """
    columns = list(zip(*nodes, strict=True))
    inside = together(ring(node, n) for node in nodes)
    across = together(ring_twice(column, n / len(columns)) for column in columns)
    return inside + across + inside


def _hierarchical_all_gather(nodes: Nodes, n: float) -> Phases:
    """All-gather in every column, then all-gather the results in every row.

    Cost: For k nodes of g GPUs, (k-1)α₂ + (n/g)(k-1)/k β₂ + (g-1)α₁ + n(g-1)/g β₁.
    """
    columns = list(zip(*nodes, strict=True))
    across = together(ring(column, n / len(columns)) for column in columns)
    return across + together(ring(node, n) for node in nodes)


def _hierarchical_broadcast(nodes: Nodes, n: float) -> Phases:
    """Broadcast down the root's column, then along every row.

    Cost: For k nodes of g GPUs, lg k (α₂ + nβ₂) + lg g (α₁ + nβ₁).
    """
    across = tree_broadcast([node[0] for node in nodes], n)
    return across + together(tree_broadcast(node, n) for node in nodes)


def _backwards(pattern: Callable[[M, float], Phases]) -> Callable[[M, float], Phases]:
    """Reverse a pattern: a broadcast, for example, becomes a reduce."""
    return lambda members, n: mirrored(pattern(members, n))


_BROADCASTS: Mapping[str, Callable[[Members, float], Phases]] = {
    "tree": tree_broadcast,
    "ring": ring_broadcast,
    "halving_doubling": doubling_broadcast,
}
_halving_reduce_scatter = _backwards(doubling_all_gather)

_FLAT: Mapping[str, Mapping[str, Callable[[Members, float], Phases]]] = {
    "all_reduce": {
        "ring": ring_twice,
        "tree": tree_all_reduce,
        "recursive_doubling": doubling_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
    },
    "broadcast": _BROADCASTS,
    "reduce": {name: _backwards(pattern) for name, pattern in _BROADCASTS.items()},
    "all_gather": {
        "ring": ring,
        "recursive_doubling": doubling_all_gather,
        "halving_doubling": doubling_all_gather,
    },
    "reduce_scatter": {
        "ring": ring,
        "recursive_doubling": _halving_reduce_scatter,
        "halving_doubling": _halving_reduce_scatter,
    },
    "scatter": {"tree": tree_scatter, "direct": one_by_one},
    "gather": {"tree": _backwards(tree_scatter), "direct": _backwards(one_by_one)},
    "all_to_all": {"direct": pairwise, "recursive_doubling": bruck_all_to_all},
    "barrier": {"recursive_doubling": dissemination},
    "monitored_barrier": {"recursive_doubling": dissemination},
}
_HIERARCHICAL: Mapping[str, Callable[[Nodes, float], Phases]] = {
    "all_reduce": _hierarchical_all_reduce,
    "broadcast": _hierarchical_broadcast,
    "reduce": _backwards(_hierarchical_broadcast),
    "all_gather": _hierarchical_all_gather,
    "reduce_scatter": _backwards(_hierarchical_all_gather),
}

COLLECTIVES = tuple(_FLAT)
ALGORITHMS = (
    "auto",
    "ring",
    "tree",
    "recursive_doubling",
    "halving_doubling",
    "hierarchical",
    "hierarchical_overlapped",
    "direct",
    *(f"{NCCL}{name}" for name in protocols.OF_ALGORITHM if name != "direct"),
)
