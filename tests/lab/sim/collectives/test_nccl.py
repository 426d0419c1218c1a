"""NCCL's communication patterns and its choice among them; docs/fidelity.md has their times."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distlab.sim import Cluster, simulate
from distlab.sim.collectives import nccl, protocols

MIB, GIB = 2**20, 2**30
GRIDS = [(1, 2), (1, 8), (2, 8), (3, 4), (4, 8), (8, 1), (5, 3)]  # nodes, GPUs per node


def machine(nodes: int, gpus: int) -> Cluster:
    """Return a DGX H100 cluster of this size in which the switches between nodes can sum data."""
    return replace(
        Cluster.preset("dgx-h100"),
        nodes=nodes,
        gpus_per_node=gpus,
        nics_per_node=gpus,
        network_adds=True,
    )


def all_reduces() -> list[tuple[str, int, int]]:
    return [
        (name, nodes, gpus)
        for nodes, gpus in GRIDS
        for name in nccl.algorithms("all_reduce", range(nodes * gpus), machine(nodes, gpus))
    ]


def pattern_of(collective: str, algorithm: str, nodes: int, gpus: int) -> nccl.Pattern:
    return nccl.pattern(collective, algorithm, tuple(range(nodes * gpus)), machine(nodes, gpus))


# --- Data carried --------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "nodes", "gpus"), all_reduces())
def test_every_gpu_hears_of_every_other_one(algorithm: str, nodes: int, gpus: int) -> None:
    transfers = pattern_of("all_reduce", algorithm, nodes, gpus).rounds[0]
    heard = {gpu: {gpu} for gpu in range(nodes * gpus)}
    for _ in range(2 * len(heard)):
        for src, dst, _ in transfers:
            heard[dst] |= heard[src]
    assert all(len(others) == nodes * gpus for others in heard.values())


@pytest.mark.parametrize(("nodes", "gpus"), GRIDS)
@pytest.mark.parametrize("root", [0, 1])
def test_a_broadcast_enters_every_gpu_once(nodes: int, gpus: int, root: int) -> None:
    p = nodes * gpus
    members = (*range(root, p), *range(root))
    pattern = nccl.pattern("broadcast", "ring", members, machine(nodes, gpus))
    got: defaultdict[int, float] = defaultdict(float)
    for src, dst, share in pattern.rounds[0]:
        assert src != dst
        got[dst] += share
    assert got == pytest.approx({gpu: 1.0 for gpu in range(p) if gpu != root})
    reduce = nccl.pattern("reduce", "ring", members, machine(nodes, gpus))
    assert {(dst, src) for src, dst, _ in reduce.rounds[0]} == {
        (src, dst) for src, dst, _ in pattern.rounds[0]
    }


# --- Trees ---------------------------------------------------------------------------------------


@given(st.integers(1, 200))
def test_the_two_trees_are_trees_and_inner_nodes_of_one_are_leaves_of_the_other(k: int) -> None:
    first = nccl.tree_parents(k)
    second = nccl.other_tree(first)
    for parents in (first, second):
        assert parents.count(-1) == 1
        for node in range(k):
            assert depth(parents, node) <= ceil(log2(k)) if k > 1 else parents == [-1]
        assert max(children(parents)) <= 2
    busy = [a and b for a, b in zip(children(first), children(second), strict=True)]
    assert sum(map(bool, busy)) <= (0 if k < 3 else 2)  # only roots may be inner nodes of both


def depth(parents: Sequence[int], node: int) -> int:
    steps = 0
    while parents[node] >= 0:
        node, steps = parents[node], steps + 1
        assert steps <= len(parents), "a circle"
    return steps


def children(parents: Sequence[int]) -> list[int]:
    return [parents.count(node) for node in range(len(parents))]


# --- Time ----------------------------------------------------------------------------------------


def takes(collective: str, num_bytes: int) -> float:
    x = torch.empty(num_bytes // 4, device="meta")
    p = dist.get_world_size()
    if collective == "all_reduce":
        dist.all_reduce(x)
    elif collective == "all_gather":
        dist.all_gather_single(torch.empty(x.numel() * p, device="meta"), x)
    elif collective == "broadcast":
        dist.broadcast(x, 0)
    elif collective == "barrier":
        dist.barrier()
    else:
        dist.all_to_all_single(torch.empty_like(x), x)
    return 0.0


@pytest.mark.parametrize(("preset", "nodes"), [("dgx-h100", 2), ("dgx-a100", 1)])
@pytest.mark.parametrize("num_bytes", [48 * 1024, 48 * MIB])
@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "broadcast", "all_to_all", "barrier"]
)
def test_a_simulation_takes_as_long_as_the_tuner_expects(
    collective: str, num_bytes: int, preset: str, nodes: int
) -> None:
    cluster = Cluster.preset(preset, nodes)
    p = cluster.num_gpus
    run = simulate(takes, p, collective, num_bytes, cluster=cluster)
    num_bytes *= {"all_gather": p, "barrier": 0}.get(collective, 1)
    way = protocols.cheapest(collective, "auto", range(p), num_bytes, cluster)
    assert run.seconds == pytest.approx(way.seconds, rel=0.02)


# --- The choice ----------------------------------------------------------------------------------

# Choices in NCCL's own logs: stas00/ml-engineering, all-reduce-8xH200 (2.27.7), and
# NVIDIA/nccl-tests issue 309 (2.26.2).
LOGGED = [
    ("dgx-h200", 1, 64 * 1024, "ring", "LL"),
    ("dgx-h200", 1, MIB, "ring", "LL"),
    ("dgx-h200", 1, 64 * MIB, "nvls", "NVLS"),
    ("dgx-h200", 1, 8 * GIB, "nvls", "NVLS"),
    ("dgx-h100", 2, 8 * GIB, "nvls_tree", "NVLS"),
    ("dgx-a100", 1, 8 * GIB, "ring", "Simple"),
]


@pytest.mark.parametrize(("preset", "nodes", "num_bytes", "algorithm", "protocol"), LOGGED)
def test_the_choice_is_that_of_nccls_log(
    preset: str, nodes: int, num_bytes: int, algorithm: str, protocol: str
) -> None:
    cluster = Cluster.preset(preset, nodes)
    way = protocols.cheapest("all_reduce", "auto", range(cluster.num_gpus), num_bytes, cluster)
    assert (way.algorithm, way.protocol) == (algorithm, protocol)
