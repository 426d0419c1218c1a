"""Plans of collectives take the textbook times, and data reaches every GPU that needs it."""

import itertools
from collections.abc import Callable, Sequence
from math import ceil, floor, log2

import pytest

from distlab.sim.collectives.algorithms import (
    ALGORITHMS,
    COLLECTIVES,
    Phase,
    plan,
)
from distlab.sim.collectives.phases import round_s
from distlab.sim.hardware.cluster import Cluster
from distlab.sim.network.flows import Network

SIZES = (1, 2, 3, 4, 5, 8, 16)
ODD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16)
POWERS = (1, 2, 4, 8, 16)
ALPHA_S, BETA_S = 7e-6, 1 / 13e9
ROOTED = ("broadcast", "reduce", "scatter", "gather")
PAIRS = list(itertools.product(COLLECTIVES, ALGORITHMS))
# All other algorithms pipeline pieces of the buffer through all GPUs: see test_nccl.
STEP_BY_STEP = [
    (collective, algorithm)
    for collective, algorithm in PAIRS
    if not algorithm.startswith("nccl") and not algorithm.endswith("overlapped")
]


def estimate_s(phases: Sequence[Phase], cluster: Cluster, *, shared: bool = False) -> float:
    """Return the estimated time of the phases if there is no other traffic."""
    return sum(round_s(phase, cluster, shared=shared) * phase.repeat for phase in phases)


def uniform(p: int) -> Cluster:
    return Cluster(1, p, latency_s=ALPHA_S, nvlink_bytes_per_s=1 / BETA_S)


def lg(p: int) -> int:
    return ceil(log2(p))


def core(p: int) -> int:
    """Return the largest power of two that is at most p."""
    return 1 << floor(log2(p))


def simulated_s(phases: Sequence[Phase], cluster: Cluster) -> float:
    """Return the time of the phases if flows start after their latency and share links."""
    network = Network([link.bytes_per_s for link in cluster.links])
    now_s = 0.0
    for phase in phases:
        starts: list[tuple[float, tuple[int, ...], float]] = []
        for src, dst, size in phase.transfers:
            route = cluster.route(src, dst)
            begin_s = now_s + phase.repeat * route.latency_s
            starts.append((begin_s, route.links, phase.repeat * size))
        starts.sort()
        under_way = len(starts)
        while under_way:
            if starts and starts[0][0] <= network.next_finish_s():
                begin_s, links, size = starts.pop(0)
                network.start(links, size, begin_s)
            else:
                now_s = network.next_finish_s()
                under_way -= len(network.pop_finished(now_s))
    return now_s


# --- Seconds -------------------------------------------------------------------------------------

Form = Callable[[int], tuple[float, float]]  # p -> successive messages, and their bytes / n

FORMS: list[tuple[str, str, Form, Sequence[int]]] = [
    ("broadcast", "tree", lambda p: (lg(p), lg(p)), SIZES),
    ("broadcast", "halving_doubling", lambda p: (2 * lg(p), 2 * (p - 1) / p), SIZES),
    ("broadcast", "ring", lambda p: (lg(p) + p - 1, 2 * (p - 1) / p), SIZES),
    ("reduce", "tree", lambda p: (lg(p), lg(p)), SIZES),
    ("reduce", "halving_doubling", lambda p: (2 * lg(p), 2 * (p - 1) / p), SIZES),
    ("reduce", "ring", lambda p: (lg(p) + p - 1, 2 * (p - 1) / p), SIZES),
    ("scatter", "tree", lambda p: (lg(p), (p - 1) / p), SIZES),
    ("gather", "tree", lambda p: (lg(p), (p - 1) / p), SIZES),
    ("scatter", "direct", lambda p: (p - 1, (p - 1) / p), SIZES),
    ("gather", "direct", lambda p: (p - 1, (p - 1) / p), SIZES),
    ("all_gather", "ring", lambda p: (p - 1, (p - 1) / p), SIZES),
    ("all_gather", "recursive_doubling", lambda p: (lg(p), (p - 1) / p), SIZES),
    ("reduce_scatter", "ring", lambda p: (p - 1, (p - 1) / p), SIZES),
    ("reduce_scatter", "halving_doubling", lambda p: (lg(p), (p - 1) / p), SIZES),
    ("all_reduce", "tree", lambda p: (2 * lg(p), 2 * lg(p)), SIZES),
    ("all_reduce", "ring", lambda p: (2 * (p - 1), 2 * (p - 1) / p), SIZES),
    ("all_reduce", "recursive_doubling", lambda p: (lg(p), lg(p)), POWERS),
    (
        "all_reduce",
        "recursive_doubling",
        lambda p: (floor(log2(p)) + 2, floor(log2(p)) + 2),
        (3, 5, 6, 7, 12),
    ),
    ("all_reduce", "halving_doubling", lambda p: (2 * lg(p), 2 * (p - 1) / p), POWERS),
    (
        # MPICH's comment says (p-1)/p, but only core(p) ranks halve and double.
        "all_reduce",
        "halving_doubling",
        lambda p: (2 * floor(log2(p)) + 2, 2 * (core(p) - 1) / core(p) + 2),
        (3, 5, 6, 7, 12),
    ),
    ("all_to_all", "direct", lambda p: (p - 1, (p - 1) / p), SIZES),
    ("all_to_all", "recursive_doubling", lambda p: (lg(p), lg(p) / 2), POWERS),
    ("all_to_all", "recursive_doubling", lambda p: (lg(p), _bits(p) / p), (3, 5, 6, 7, 12)),
    ("barrier", "auto", lambda p: (lg(p), 0), SIZES),
    ("monitored_barrier", "auto", lambda p: (lg(p), 0), SIZES),
]


def _bits(p: int) -> int:
    """Count the 1 bits in 0 … p-1, since a message takes one hop per 1 bit of its distance."""
    return sum(bin(way).count("1") for way in range(p))


@pytest.mark.parametrize("num_bytes", [0.0, 1000.0, 1e9])
@pytest.mark.parametrize(
    ("collective", "algorithm", "form", "sizes"),
    FORMS,
    ids=[f"{form[0]}-{form[1]}-p{form[3][1]}" for form in FORMS],
)
def test_seconds_are_those_of_the_closed_form(
    collective: str, algorithm: str, form: Form, sizes: Sequence[int], num_bytes: float
) -> None:
    for p in sizes:
        messages, share = form(p)
        size = 0.0 if collective.endswith("barrier") else num_bytes
        expected_s = messages * ALPHA_S + share * size * BETA_S
        cluster = uniform(p)
        phases = plan(collective, algorithm, range(p), size, cluster)
        close = pytest.approx(expected_s, rel=1e-9, abs=0)
        assert estimate_s(phases, cluster) == close
        assert estimate_s(phases, cluster, shared=True) == close  # equal, since no link is shared
        assert simulated_s(phases, cluster) == close


CLUSTERS = {
    "one switch": Cluster(1, 8),
    "a NIC per GPU": Cluster(3, 4),
    "one NIC per node": Cluster(2, 4, nics_per_node=1),
    "ethernet": Cluster(3, 2, topology="ethernet"),
    "oversubscribed": Cluster(4, 2, topology="fat-tree", oversubscription=7.0),
    "rails": Cluster(3, 3, topology="rail-optimised"),
    "torus": Cluster(3, 3, topology="torus"),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_the_simulated_time_lies_between_the_two_estimates(cluster: Cluster) -> None:
    for (collective, algorithm), size in itertools.product(PAIRS, (1e3, 1e7)):
        phases = plan(collective, algorithm, range(cluster.num_gpus), size, cluster)
        at_s = simulated_s(phases, cluster)
        assert estimate_s(phases, cluster) <= at_s * (1 + 1e-9)
        assert at_s <= estimate_s(phases, cluster, shared=True) * (1 + 1e-9)


# --- Who talks to whom ---------------------------------------------------------------------------


def heard_of(phases: Sequence[Phase], gpus: Sequence[int]) -> dict[int, set[int]]:
    """Return, for each GPU, the GPUs whose data may have reached it."""
    known = {gpu: {gpu} for gpu in gpus}
    for phase in phases:
        for _ in range(phase.repeat):
            before = {gpu: set(known[gpu]) for gpu in gpus}
            for src, dst, _ in phase.transfers:
                known[dst] |= before[src]
    return known


@pytest.mark.parametrize(("collective", "algorithm"), STEP_BY_STEP)
def test_the_news_reaches_all_whom_it_must_reach(collective: str, algorithm: str) -> None:
    for p in ODD_SIZES:
        gpus = [3 * rank + 1 for rank in reversed(range(p))]
        for root in {0, p // 2, p - 1} if collective in ROOTED else {0}:
            phases = plan(collective, algorithm, gpus, 1.0, Cluster(4, 12), root=root)
            known = heard_of(phases, gpus)
            if collective in ("broadcast", "scatter"):
                assert all(gpus[root] in known[gpu] for gpu in gpus)
            elif collective in ("reduce", "gather"):
                assert known[gpus[root]] == set(gpus)
            else:
                assert all(known[gpu] == set(gpus) for gpu in gpus)


def test_a_ring_in_rank_order_crosses_each_node_boundary_once() -> None:
    cluster = Cluster(4, 8)
    [phase] = plan("all_gather", "ring", range(32), 1.0, cluster)
    crossings = [
        (cluster.node_of(src), cluster.node_of(dst))
        for src, dst, _ in phase.transfers
        if cluster.node_of(src) != cluster.node_of(dst)
    ]
    assert crossings == [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize("algorithm", ["tree", "hierarchical"])
def test_a_broadcast_enters_each_node_once_whatever_the_root(algorithm: str) -> None:
    cluster = Cluster(4, 8)
    for root in (0, 8, 24):
        phases = plan("broadcast", algorithm, range(32), 1.0, cluster, root=root)
        entered = [
            cluster.node_of(dst)
            for phase in phases
            for src, dst, _ in phase.transfers
            if cluster.node_of(src) != cluster.node_of(dst)
        ]
        assert sorted([*entered, cluster.node_of(root)]) == [0, 1, 2, 3]
