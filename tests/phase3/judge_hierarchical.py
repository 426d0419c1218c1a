"""Judges task 3.8: sums, bits, what crosses between the nodes, seconds and memory."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Cluster, Options
from distlab.util.text import counted
from judging.checks import MEASURED, check_peak, short, uneven
from judging.collective import AllReduce, check_same_bits
from judging.tensors import KINDS, exact
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
    by_rank = grade.run(b.reduce_fractions, 6, _hosts(2, 3), b.FUNCTIONS, if_stuck=STUCK).results
    for rank, sums in enumerate(by_rank):
        for case, got in sums.items():
            check_same_bits(f"rank {rank} of 6, {case}", got, by_rank[0][case])


@task("3.8")
@pytest.mark.parametrize(
    ("nodes", "gpus", "numbering"),
    [(2, 2, "block"), (2, 4, "block"), (3, 2, "cyclic"), (4, 1, "block"), (1, 4, "block")],
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
    run = grade.run(
        *(b.time_one, len(hosts), hosts, num_elements, b.RINGS), cluster=cluster, if_stuck=STUCK
    )
    where = f"{_shape(nodes, gpus)}, {num_elements:,} float32 numbers, rings"
    _check_ones(where, run, len(hosts))
    _check_functions_are_used(run)
    _check_bytes(where, run, hosts, 4 * num_elements)
    _check_seconds(where, run, cluster, 4 * num_elements)
    _check_links_of_torch(grade, cluster, hosts, num_elements)


def _check_functions_are_used(run: Run) -> None:
    of_lesson = [number - 1 for number in run.collectives]  # the body itself calls one barrier
    check(
        not any(of_lesson),
        "hierarchical_all_reduce should be made of the three functions that are passed, here rings "
        "of messages; yours calls a built-in collective. Collective calls per rank: "
        f"{of_lesson}.",
    )


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
            check(
                [number for *_, number in calls] == [shape[0], chunk, shape[0]],
                f"{_shape(nodes, gpus)}: rank {rank}, {dtype} of {shape[0]}: reduce_scatter and "
                f"all_gather should get all {shape[0]} elements, and all_reduce the {chunk} of the "
                f"chunk that reduce_scatter returned; they got {short(calls)}.",
            )


def _check_calls(where: str, dtype: str, calls: list[b.NotedCall]) -> None:
    steps = [(name, group) for name, group, *_ in calls]
    check(
        steps == b.STEPS,
        f"{where}, {dtype}: of the functions that were passed, each takes one step: "
        f"{_steps(b.STEPS)}; yours made {_steps(steps)}. An all_reduce that is passed, say "
        "one that compresses, is there to carry what crosses between the nodes.",
    )
    others = sorted({of for _, _, of, _ in calls} - {dtype})
    check(
        not others,
        f"{where}: x is {dtype}, but a function got a tensor of {', '.join(others)}, which sends "
        "other bytes and rounds elsewhere. Pass the views of x as they are.",
    )


def _steps(steps: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {group}" for name, group in steps) or "none of these calls"


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
    sent: Counter[tuple[int, bool]] = Counter()
    for send, recv in run.trace.pairs() if run.trace else ():
        sent[send.rank, hosts[send.rank] == hosts[recv.rank]] += send.num_bytes
    between, inside = 2 * (k - 1) * num_bytes // (k * g), 2 * (g - 1) * num_bytes // g
    across = [sent[rank, False] for rank in range(len(hosts))]
    for rank, got in enumerate(across):
        check(
            got == between,
            f"{where}: rank {rank} should send {between:,} bytes to other nodes, 2(k-1)/k of its "
            f"chunk; it sends {got:,}. {_cause_of_bytes(across, g * between)}",
        )
        got = sent[rank, True]
        check(
            got == inside,
            f"{where}: rank {rank} should send {inside:,} bytes inside its node, 2(g-1)/g of x; it "
            f"sends {got:,}. A reduce-scatter inside before the all-reduce across, and an "
            "all-gather after it, send (g-1)/g of x each.",
        )


def _cause_of_bytes(by_rank: list[int], of_all_x: int) -> str:
    if idle := [rank for rank, got in enumerate(by_rank) if not got]:
        return (
            f"Ranks {short(idle)} send nothing there, as in a flat ring, or if one rank does it "
            "for its node. All ranks of a node should share what crosses, each for its own chunk."
        )
    if {*by_rank} == {of_all_x}:
        return (
            "Only the chunk that a rank has after the reduce-scatter inside its node should cross, "
            "not all of x."
        )
    return "Scatter inside the node first, so that only a chunk per rank has to cross."


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


def _check_links_of_torch(
    grade: Grade, cluster: Cluster, hosts: list[str], num_elements: int
) -> None:
    run = grade.run(
        *(b.time_one, len(hosts), hosts, num_elements, b.TORCH),
        cluster=cluster,
        options=Options(algorithm="ring"),
        if_stuck=STUCK,
    )
    by_link = zip(cluster.links, run.trace.bytes_by_link if run.trace else [], strict=True)
    crossed = sum(num for link, num in by_link if ".nic" in link.name and link.name.endswith("out"))
    expected = 2 * (cluster.nodes - 1) * 4 * num_elements
    check(
        crossed <= 1.01 * expected,
        f"{_shape(cluster.nodes, cluster.gpus_per_node)}, torch's functions: {expected:,} bytes "
        f"should leave the nodes in all, 2(k-1) times those of x; {crossed:,.0f} do. "
        "Reduce-scatter inside the node first, so that only a chunk per rank has to cross.",
    )


@task("3.8")
def test_the_rings_memory_is_all_it_needs(grade: Grade) -> None:
    num_elements = 8 * grade.random.randrange(5_000, 9_000)
    run = grade.run(
        *(b.time_one, 8, _hosts(2, 4), num_elements, b.RINGS), options=MEASURED, if_stuck=STUCK
    )
    _check_ones("2 nodes of 4 ranks", run, 8)
    check_peak(
        *(run, [4 * (num_elements + num_elements // 4) + 512] * 8),
        "x, and one chunk of it in which the ring that is passed receives, are all that is needed. "
        "What reduce_scatter returns is a view of x: sum that, and do not copy it.",
    )
