"""Judges task 3.8: sums, bits, traffic between the nodes, seconds and memory."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Cluster
from distlab.util.text import counted
from judging.checks import MEASURED, check_peak, uneven
from judging.collective import AllReduce, check_same_bits
from judging.comparing import check_equal
from judging.tensors import FRACTIONS, KINDS, exact
from phase3 import levels as b
from phase3_multi_node.given import ranks_by_host

STUCK = (
    "Do all ranks call the three functions in the same order, each with its own group: inside, "
    "across, inside? Every rank has work in each of them, not only the first one of a node."
)
SUM = AllReduce(
    "hierarchical_all_reduce",
    advice="Each step builds on the one before: the all-reduce across the nodes sums the chunk "
    "that reduce_scatter returned, a view of x, in place, and the all-gather collects those chunks "
    "in x.",
)
SHAPES = [(2, 3), (3, 2), (1, 4), (5, 1), (1, 1)]


def _hosts(nodes: int, gpus: int, numbering: str = "block") -> list[str]:
    ranks = range(nodes * gpus)
    return [f"node{rank // gpus if numbering == 'block' else rank % nodes}" for rank in ranks]


@task("3.8", real=True)
def test_every_rank_has_the_sum_of_all_nodes(grade: Grade) -> None:
    for nodes, gpus in SHAPES if grade.is_simulated else [(2, 2)]:
        hosts = _hosts(nodes, gpus, grade.random.choice(("block", "cyclic")))
        options = uneven(grade.random, len(hosts))
        run = grade.run(
            *(b.reduce_kinds, len(hosts), hosts, b.FUNCTIONS), options=options, if_stuck=STUCK
        )
        for functions in b.FUNCTIONS:
            where = f"{_shape(nodes, gpus)}, hosts {hosts}, {functions}: "
            _check_sums(where, [sums[functions] for sums in run.results])


def _shape(nodes: int, gpus: int) -> str:
    return f"{counted(nodes, 'node')} of {counted(gpus, 'rank')}"


def _check_sums(where: str, by_rank: Sequence[Any]) -> None:
    for place, kind in enumerate(KINDS):
        SUM.check([sums[place] for sums in by_rank], kind, exact, where)


@task("3.8")
def test_nodes_inside_a_larger_world(grade: Grade) -> None:
    run = grade.run(b.reduce_kinds_of_members, b.OUTER_WORLD_SIZE, if_stuck=STUCK)
    members = [run.results[rank][b.RINGS] for node in b.OUTER_NODES for rank in node]
    _check_sums(f"nodes {[*b.OUTER_NODES]} of {b.OUTER_WORLD_SIZE} ranks, rings: ", members)


@task("3.8")
def test_all_ranks_have_the_same_bits(grade: Grade) -> None:
    by_rank = grade.run(b.reduce_fractions, 6, _hosts(2, 3), if_stuck=STUCK).results
    for rank, sums in enumerate(by_rank):
        for dtype, got, first in zip(FRACTIONS, sums, by_rank[0], strict=True):
            check_same_bits(f"rank {rank} of 6, {dtype}", got, first)


@task("3.8")
@pytest.mark.parametrize(
    ("nodes", "gpus", "numbering"),
    [(2, 4, "block"), (3, 2, "cyclic"), (4, 1, "block"), (1, 4, "block")],
)
def test_little_crosses_between_nodes(grade: Grade, nodes: int, gpus: int, numbering: str) -> None:
    cluster = Cluster(
        nodes,
        gpus,
        numbering=numbering,
        latency_s=grade.random.uniform(2e-6, 9e-6),
        nvlink_bytes_per_s=grade.random.uniform(1e11, 4e11),
        net_latency_s=grade.random.uniform(1e-5, 9e-5),
        nic_bytes_per_s=grade.random.uniform(5e9, 4e10),
    )
    hosts = _hosts(nodes, gpus, numbering)
    num_elements = nodes * gpus * grade.random.randrange(1000, 9000)
    run = grade.run(*(b.time_one, len(hosts), hosts, num_elements), cluster=cluster, if_stuck=STUCK)
    where = f"{_shape(nodes, gpus)}, {num_elements:,} float32 numbers, rings"
    _check_ones(where, run, len(hosts))
    of_lesson = [number - 1 for number in run.collectives]  # the body itself calls one barrier
    check_equal(
        *(where, "the number of built-in collectives per rank", [0] * len(hosts), of_lesson),
        "hierarchical_all_reduce is made of the three functions that are passed.",
    )
    _check_bytes(where, run, hosts, 4 * num_elements)
    _check_seconds(where, run, cluster, 4 * num_elements)


@task("3.8")
@pytest.mark.parametrize(("nodes", "gpus"), [(2, 3), (3, 2)])
def test_each_function_takes_the_step_that_is_its_own(grade: Grade, nodes: int, gpus: int) -> None:
    hosts = _hosts(nodes, gpus, grade.random.choice(("block", "cyclic")))
    run = grade.run(b.note_calls, len(hosts), hosts, if_stuck=STUCK)
    for rank, by_kind in enumerate(run.results):
        for (shape, dtype), calls in zip(b.NOTED_KINDS, by_kind, strict=True):
            _check_calls(f"{_shape(nodes, gpus)}, hosts {hosts}: rank {rank}", dtype, calls)
            place = next(node.index(rank) for node in ranks_by_host(hosts) if rank in node)
            chunk = len(range(place, shape[0], gpus))  # as long as the chunk of tensor_split
            check_equal(
                f"{_shape(nodes, gpus)}: rank {rank}, {dtype} of {shape[0]}",
                "the numbers of elements that the functions get",
                *([shape[0], chunk, shape[0]], [number for *_, number in calls]),
                "reduce_scatter and all_gather get all, and all_reduce the chunk that "
                "reduce_scatter returned.",
            )


def _check_calls(where: str, dtype: str, calls: list[b.NotedCall]) -> None:
    check_equal(
        *(f"{where}, {dtype}", "the calls of the functions that were passed"),
        *(b.STEPS, [[name, group] for name, group, *_ in calls]),
        "Each takes one step: an all_reduce that is passed, say one that compresses, is there to "
        "carry what crosses between the nodes.",
    )
    check_equal(
        *(where, "the dtypes of what the functions get"),
        *([dtype], sorted({of for _, _, of, _ in calls})),
        "Another dtype sends other bytes and rounds elsewhere. Pass the views of x as they are.",
    )


def _check_ones(where: str, run: Run, total: int) -> None:
    for rank, (_, least, greatest) in enumerate(run.results):
        check(
            least == greatest == total,
            f"{where}: rank {rank}: a sum of {total} ones should be {total}; x holds numbers "
            f"from {least:g} to {greatest:g}.",
        )


def _check_bytes(where: str, run: Run, hosts: list[str], num_bytes: int) -> None:
    k = len(set(hosts))
    g = len(hosts) // k
    sent: Counter[int] = Counter()
    for send, recv in run.trace.pairs() if run.trace else ():
        sent[send.rank] += send.num_bytes if hosts[send.rank] != hosts[recv.rank] else 0
    check_equal(
        *(where, "the bytes that each rank sends to other nodes, 2(k-1)/k of its chunk,"),
        [2 * (k - 1) * num_bytes // (k * g)] * len(hosts),
        [sent[rank] for rank in range(len(hosts))],
        "Scatter inside the node first, so that only a chunk per rank has to cross, not all of x. "
        "If some ranks send nothing there, as in a flat ring, or one rank sends for its node, they "
        "do not share what crosses.",
    )
    within = 2 * (g - 1) * num_bytes // g
    check_equal(
        *(where, "the bytes that each rank sends inside its node, 2(g-1)/g of x,"),
        [within] * len(hosts),
        [round(all_sent) - sent[rank] for rank, all_sent in enumerate(run.bytes_sent)],
        "A reduce-scatter inside before the all-reduce across, and an all-gather after it, send "
        "(g-1)/g of x each.",
    )


def _check_seconds(where: str, run: Run, cluster: Cluster, num_bytes: int) -> None:
    k, g = cluster.nodes, cluster.gpus_per_node
    inside_s = cluster.latency_s + num_bytes / g / cluster.nvlink_bytes_per_s
    across_s = cluster.net_latency_s + num_bytes / (g * k) / cluster.nic_bytes_per_s
    expected_s = 2 * (g - 1) * inside_s + 2 * (k - 1) * across_s
    taken_s = max(seconds for seconds, *_ in run.results)
    check(
        taken_s <= 1.01 * expected_s,
        f"{where}: it should take 2(g-1)(α₁ + n/g·β₁) + 2(k-1)(α₂ + n/(gk)·β₂) = "
        f"{1e6 * expected_s:.1f} µs, but it takes {1e6 * taken_s:.1f} µs. The three functions "
        "should follow each other without anything in between, on all ranks at the same time.",
    )


@task("3.8")
def test_the_rings_memory_is_all_it_needs(grade: Grade) -> None:
    num_elements = 8 * grade.random.randrange(5_000, 9_000)
    run = grade.run(*(b.time_one, 8, _hosts(2, 4), num_elements), options=MEASURED, if_stuck=STUCK)
    _check_ones("2 nodes of 4 ranks", run, 8)
    check_peak(
        *(run, [4 * (num_elements + num_elements // 4) + 512] * 8),
        "x, and one chunk of it in which the ring that is passed receives, are all that is needed. "
        "What reduce_scatter returns is a view of x: sum that, and do not copy it.",
    )
