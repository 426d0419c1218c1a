"""Judges task 3.7: sums, bits, traffic between nodes, seconds and memory."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import Grade, Run, check_cost, task
from distlab.sim import Cluster
from distlab.util.text import counted
from judging.calls import cause_told
from judging.checks import MEASURED, check_peak, uneven
from judging.collective import AllReduce, check_results, check_same_bits, use, use_fractions
from judging.expect import expect, expect_cost
from judging.tensors import FRACTIONS, KINDS, NUMBERS, Kind, exact
from phase3_multi_node.given import Group, exchange, node_groups, ranks_by_host


def ring_reduce_scatter(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` around a ring; rank r gets chunk r, a view of ``x``."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.view(-1).tensor_split(n)
    arrived = torch.empty_like(chunks[0])
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = arrived[: len(mine)]
        exchange(chunks[(rank - step - 1) % n], (rank + 1) % n, incoming, (rank - 1) % n, group)
        mine += incoming
    return chunks[rank]


def ring_all_gather(x: Tensor, group: Group = None) -> None:
    """Fill ``x`` with the chunks of all ranks, around a ring."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = x.view(-1).tensor_split(n)
    for step in range(n - 1):
        outgoing, incoming = (chunks[(rank - step - i) % n] for i in (0, 1))
        exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)


def ring_all_reduce(x: Tensor, group: Group = None) -> None:
    """Sum ``x`` in place, around a ring."""
    ring_reduce_scatter(x, group)
    ring_all_gather(x, group)


RINGS = {
    "reduce_scatter": ring_reduce_scatter,
    "all_reduce": ring_all_reduce,
    "all_gather": ring_all_gather,
}


NOTED_KINDS = [Kind((13,), dtype) for dtype in NUMBERS]
NotedCall = tuple[str, str, str, int]  # function, group, dtype, number of elements
OUTER_NODES = (1, 2), (4, 5)  # world ranks on each node
OUTER_WORLD_SIZE = 6


@dataclass(frozen=True)
class OnNodes(AllReduce):
    """An all-reduce over the nodes of a cluster; its keyword arguments are functions to call."""

    groups: tuple[Group, ...] = ()  # the group inside a node, and the group across nodes

    def call(self, lesson: Any, x: Tensor, group: Any) -> Any:
        return getattr(lesson, self.function)(x, *self.groups, **self.keywords)


BY_TORCH = OnNodes(
    "hierarchical_all_reduce",
    advice="Each step builds on the one before: the all-reduce across the nodes sums the chunk "
    "that reduce_scatter returned, a view of x, in place, and the all-gather collects those chunks "
    "in x.",
)
BY_RINGS = replace(BY_TORCH, keywords=RINGS)


def sum_kinds(lesson: Any, hosts: Sequence[str], variants: Sequence[OnNodes]) -> list[Any]:
    """Sum a tensor of every kind with each variant."""
    groups = node_groups(hosts)
    return use(lesson, [replace(one, groups=groups) for one in variants], KINDS, exact)


def sum_kinds_of_members(lesson: Any) -> list[Any] | None:
    """Sum a tensor of every kind, by rings, on two nodes that are only part of the world."""
    members = dist.new_group([rank for node in OUTER_NODES for rank in node])
    insides = [dist.new_group([*ranks]) for ranks in OUTER_NODES]
    acrosses = [dist.new_group([*ranks]) for ranks in zip(*OUTER_NODES, strict=True)]
    for node, inside in zip(OUTER_NODES, insides, strict=True):
        if (rank := dist.get_rank()) in node:
            groups = inside, acrosses[node.index(rank)]
            return use(lesson, [replace(BY_RINGS, groups=groups)], KINDS, exact, members)
    return None


def sum_fractions(lesson: Any, hosts: Sequence[str]) -> list[list[float]]:
    """Sum numbers in several dtypes, with torch's functions; the sums have to be rounded."""
    return use_fractions(lesson, replace(BY_TORCH, groups=node_groups(hosts)), 501)


def note_calls(lesson: Any, hosts: Sequence[str]) -> list[list[NotedCall]]:
    """Return how the passed functions are called for a tensor of each kind.

    The functions take the tensor by position, as their types in given.py say. Calls with an empty
    tensor do not count.
    """
    groups = dict(zip(("inside", "across"), node_groups(hosts), strict=True))
    calls: list[NotedCall] = []

    def noting(name: str, call: Any) -> Any:
        def noted(x: Tensor, /, group: Group = None) -> Any:
            of = next((key for key, value in groups.items() if value is group), "another group")
            if x.numel():
                calls.append((name, of, str(x.dtype).removeprefix("torch."), x.numel()))
            return call(x, group)

        return noted

    functions = {name: noting(name, call) for name, call in RINGS.items()}
    variant, by_kind = replace(BY_RINGS, keywords=functions, groups=(*groups.values(),)), []
    with cause_told(BY_POSITION, TypeError):
        for kind in NOTED_KINDS:
            variant.call(lesson, exact(kind, dist.get_rank()), None)
            by_kind.append([*calls])
            calls.clear()
    return by_kind


BY_POSITION = {
    "positional-only": "The functions that are passed take the tensor by position, "
    "all_reduce(chunk, across): one of your own may call it something other than x."
}


def time_one(lesson: Any, hosts: Sequence[str], num_elements: int) -> list[float]:
    """Sum ones by rings; return how long it takes, and the smallest and the largest result."""
    variant, x = replace(BY_RINGS, groups=node_groups(hosts)), torch.ones(num_elements)
    dist.barrier()
    start_s = time.perf_counter()
    variant.call(lesson, x, None)
    return [time.perf_counter() - start_s, x.min().item(), x.max().item()]


STUCK = (
    "Do all ranks call the three functions in the same order, each with its own group: inside, "
    "across, inside? Every rank has work in each of them, not only the first one of a node."
)
SHAPES = [(2, 3), (3, 2), (1, 4), (5, 1), (1, 1)]


def _hosts(nodes: int, gpus: int, numbering: str = "block") -> list[str]:
    ranks = range(nodes * gpus)
    return [f"node{rank // gpus if numbering == 'block' else rank % nodes}" for rank in ranks]


def _shape(nodes: int, gpus: int) -> str:
    return f"{counted(nodes, 'node')} of {counted(gpus, 'rank')}"


@task("3.7", real=True)
def test_every_rank_has_the_sum_of_all_nodes(grade: Grade) -> None:
    variants = [BY_TORCH, BY_RINGS]
    for nodes, gpus in SHAPES if grade.is_simulated else [(2, 2)]:
        hosts = _hosts(nodes, gpus, grade.random.choice(("block", "cyclic")))
        options = uneven(grade.random, len(hosts))
        args = sum_kinds, len(hosts), hosts, variants
        by_rank = grade.run(*args, options=options, if_stuck=STUCK).results
        check_results(by_rank, variants, KINDS, exact, f"{_shape(nodes, gpus)}, hosts {hosts}: ")


@task("3.7")
def test_nodes_inside_a_larger_world(grade: Grade) -> None:
    run = grade.run(sum_kinds_of_members, OUTER_WORLD_SIZE, if_stuck=STUCK)
    members = [run.results[rank] for node in OUTER_NODES for rank in node]
    where = f"nodes {[*OUTER_NODES]} of {OUTER_WORLD_SIZE} ranks, rings: "
    check_results(members, [BY_RINGS], KINDS, exact, where)


@task("3.7")
def test_all_ranks_have_the_same_bits(grade: Grade) -> None:
    by_rank = grade.run(sum_fractions, 6, _hosts(2, 3), if_stuck=STUCK).results
    for rank, sums in enumerate(by_rank):
        for dtype, got, first in zip(FRACTIONS, sums, by_rank[0], strict=True):
            check_same_bits(f"rank {rank} of 6, {dtype}", got, first)


@task("3.7")
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
    run = grade.run(
        *(time_one, len(hosts), hosts, num_elements),
        cluster=cluster,
        options=MEASURED,
        if_stuck=STUCK,
    )
    where = f"{_shape(nodes, gpus)}, {num_elements:,} float32 numbers, rings"
    _check_ones(where, run, len(hosts))
    of_lesson = [number - 1 for number in run.collectives]  # the body itself calls one barrier
    cause = "hierarchical_all_reduce is made of the three functions that are passed."
    expect(
        f"{where}: the number of built-in collectives per rank", of_lesson, [0] * len(hosts), cause
    )
    _check_bytes(where, run, hosts, 4 * num_elements)
    _check_seconds(where, run, cluster, 4 * num_elements)
    check_peak(
        *(run, [4 * (num_elements + num_elements // gpus) + 512] * len(hosts)),
        "x, and one chunk of it in which the ring that is passed receives, are all that is needed. "
        "What reduce_scatter returns is a view of x: sum that, and do not copy it.",
    )


@task("3.7")
@pytest.mark.parametrize(("nodes", "gpus"), [(2, 3), (3, 2)])
def test_each_function_takes_the_step_that_is_its_own(grade: Grade, nodes: int, gpus: int) -> None:
    hosts = _hosts(nodes, gpus, grade.random.choice(("block", "cyclic")))
    run = grade.run(note_calls, len(hosts), hosts, if_stuck=STUCK)
    for rank, by_kind in enumerate(run.results):
        place = next(node.index(rank) for node in ranks_by_host(hosts) if rank in node)
        for ((size,), dtype), calls in zip(NOTED_KINDS, by_kind, strict=True):
            here = f"{_shape(nodes, gpus)}, hosts {hosts}: rank {rank}, {dtype} of {size}"
            expect(
                f"{here}: the calls of the functions that were passed",
                [[name, group] for name, group, *_ in calls],
                [["reduce_scatter", "inside"], ["all_reduce", "across"], ["all_gather", "inside"]],
                "Each takes one step: an all_reduce that is passed, say one that compresses, is "
                "there to carry what crosses between the nodes.",
            )
            chunk = len(range(place, size, gpus))  # chunk length in tensor_split
            expect(
                f"{here}: the dtypes and the numbers of elements that the functions get",
                [got for _, _, *got in calls],
                [[dtype, size], [dtype, chunk], [dtype, size]],
                "reduce_scatter and all_gather get all of x, and all_reduce the chunk that "
                "reduce_scatter returned: the views of x as they are. Another dtype sends other "
                "bytes and rounds elsewhere.",
            )


def _check_ones(where: str, run: Run, total: int) -> None:
    for rank, (_, *span) in enumerate(run.results):
        what = f"{where}: rank {rank}: the least and the greatest number of a sum of {total} ones"
        expect(what, span, [float(total)] * 2)


def _check_bytes(where: str, run: Run, hosts: list[str], num_bytes: int) -> None:
    k = len(set(hosts))
    g = len(hosts) // k
    sent: Counter[int] = Counter()
    for send, recv in run.trace.pairs() if run.trace else ():
        sent[send.rank] += send.num_bytes if hosts[send.rank] != hosts[recv.rank] else 0
    expect_cost(
        f"{where}: the bytes that each rank sends to other nodes, 2(k-1)/k of its chunk,",
        [sent[rank] for rank in range(len(hosts))],
        [2 * (k - 1) * num_bytes // (k * g)] * len(hosts),
        "Scatter inside the node first, so that only a chunk per rank has to cross, not all of x. "
        "If some ranks send nothing there, as in a flat ring, or one rank sends for its node, they "
        "do not share what crosses.",
    )
    expect_cost(
        f"{where}: the bytes that each rank sends inside its node, 2(g-1)/g of x,",
        [round(all_sent) - sent[rank] for rank, all_sent in enumerate(run.bytes_sent)],
        [2 * (g - 1) * num_bytes // g] * len(hosts),
        "A reduce-scatter inside before the all-reduce across, and an all-gather after it, send "
        "(g-1)/g of x each.",
    )


def _check_seconds(where: str, run: Run, cluster: Cluster, num_bytes: int) -> None:
    k, g = cluster.nodes, cluster.gpus_per_node
    inside_s = cluster.latency_s + num_bytes / g / cluster.nvlink_bytes_per_s
    across_s = cluster.net_latency_s + num_bytes / (g * k) / cluster.nic_bytes_per_s
    expected_s = 2 * (g - 1) * inside_s + 2 * (k - 1) * across_s
    taken_s = max(seconds for seconds, *_ in run.results)
    check_cost(
        taken_s <= 1.01 * expected_s,
        f"{where}: it should take 2(g-1)(α₁ + n/g·β₁) + 2(k-1)(α₂ + n/(gk)·β₂) = "
        f"{1e6 * expected_s:.1f} µs, but it takes {1e6 * taken_s:.1f} µs. The three functions "
        "should follow each other without anything in between, on all ranks at the same time.",
    )
