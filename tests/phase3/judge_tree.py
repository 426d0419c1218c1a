"""Judges tasks 3.4 and 3.5: sums, bits, edges, rounds, bandwidth, latency and memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.sim import Cluster
from distlab.util.text import counted
from judging.calls import int_list, pair
from judging.checks import (
    BYTE_S,
    LATENCY_S,
    MEASURED,
    Edge,
    check_silent,
    rounds_of_tree,
    short,
    uneven,
)
from judging.collective import AllReduce, Call, Contract, Numbers, check_results, use
from judging.expect import expect, expect_cost
from judging.tensors import LARGE, Kind, even_size, exact, powers

Trees = tuple[list[int], list[int]]


def trees_of(lesson: Any, sizes: Sequence[int]) -> list[Trees]:
    """Return the learner's two trees for each size."""
    return [_trees(lesson, size) for size in sizes]


def _trees(lesson: Any, size: int) -> Trees:
    function = f"double_tree({size})"
    first, second = pair(function, lesson.double_tree(size), "two lists of parents")
    return int_list(function, first), int_list(function, second)


@dataclass(frozen=True)
class AlongTrees(AllReduce):
    """An all-reduce that also returns the learner's trees, to check its messages against."""

    def call(self, lesson: Any, x: Tensor, group: Any) -> Any:
        super().call(lesson, x, group)
        return _trees(lesson, dist.get_world_size(group))

    def found(self, x: Tensor, returned: Any, rank: int, n: int) -> Any:
        return {"sum": super().found(x, None, rank, n), "trees": returned}

    def check(self, by_rank: Sequence[Any], kind: Kind, numbers: Numbers, where: str) -> None:
        super().check([found["sum"] for found in by_rank], kind, numbers, where)


HAND_OVER = "In each round, half of the ranks that are left should hand over to the other half."
PASS_ON = "In each round, every rank that has the sum should pass it on."
OF_MESSAGES = "this all-reduce should be made of messages (sends and receives)"


def _twice(num_elements: int, n: int) -> Counter[int]:
    """Return the lengths of the messages that carry x up a tree and down again."""
    return Counter({num_elements: 2 * (n - 1)})


# Task 3.4: tree_all_reduce


def _check_up_and_down(call: Call) -> None:
    """Check that messages go up a tree to rank 0, and down a tree from it, in few rounds."""
    run, n = call.run, call.n
    pairs = [*run.trace.pairs()] if run.trace else []
    has_enough = len(pairs) <= 2 * (n - 1)
    judge = check if has_enough else check_cost
    judge(
        len(pairs) == 2 * (n - 1),
        f"on {counted(n, 'rank')} there should be {counted(2 * (n - 1), 'message')}, {n - 1} up to "
        f"rank 0 and {n - 1} down again; messages sent per rank: {run.messages}. Each partial sum, "
        "and the whole sum for each rank, is one message.",
    )
    if not has_enough:
        return
    received_s = [recv.end_s for _, recv in pairs if recv.rank == 0]
    check(
        all(send.start_s >= max(received_s) for send, _ in pairs if send.rank == 0),
        f"on {counted(n, 'rank')}, rank 0 should send nothing before it has received all partial "
        "sums: it is the root of the tree, at which the way up ends.",
    )
    up, down = _up_and_down([(send.rank, recv.rank) for send, recv in pairs])
    expect(
        f"on {counted(n, 'rank')}: the ranks that send a partial sum on the way to rank 0",
        *(sorted(src for src, _ in up), [*range(1, n)]),
        "Each sends one, once, before the whole sum comes back to it.",
    )
    ways = (("up", [(dst, src) for src, dst in up], HAND_OVER), ("down", down, PASS_ON))
    for way, edges, advice in ways:
        most, rounds = ceil(log2(n)), rounds_of_tree(edges, 0)
        check_cost(
            rounds <= most,
            f"on {counted(n, 'rank')}, the way {way} should take {counted(most, 'round')}, in each "
            f"of which a rank sends or receives one message; with your tree it takes {rounds}. "
            f"{advice}",
        )


def _up_and_down(edges: Sequence[Edge]) -> tuple[list[Edge], list[Edge]]:
    """Split messages, sorted by arrival, into those on the way up and those on the way down.

    The last message to reach a rank is on the way down, unless the rank is 0.
    """
    last = {dst: place for place, (_, dst) in enumerate(edges) if dst != 0}
    down = {*last.values()}
    up = [edge for place, edge in enumerate(edges) if place not in down]
    return up, [edges[place] for place in sorted(down)]


TREE = Contract(
    task="3.4",
    name="a_tree",
    collective=AllReduce("tree_all_reduce"),
    worlds=(2, 3, 4, 5, 6, 7, 8, 16, 1),
    length=lambda random: random.randrange(1, 30),
    made_of=OF_MESSAGES,
    traffic=_check_up_and_down,
    messages=_twice,
    rounds=lambda n: 2 * ceil(log2(n)),
    late="On the way down, send first to the child with the most ranks below it, which must pass "
    "the sum on; on the way up, receive from it last.",
    timed_up_to=30,  # elements; several messages this short, sent together, take no longer than one
    inboxes=lambda _rank: 1,
    memory="A rank needs x and one tensor to receive into, which it can reuse for every message. "
    "Add in place: x += …",
    kinds_on=(4,),
    bits_on=(7,),
)
globals().update(TREE.tests())


# Task 3.5: double_tree


@task("3.5")
def test_no_rank_has_more_than_two_children_and_no_path_is_long(grade: Grade) -> None:
    sizes = [*range(1, 36), grade.random.randrange(36, 100), 127, 128, 129]
    run = grade.run(trees_of, 2, sizes)
    check_silent(run, "double_tree")
    for n, trees, of_other in zip(sizes, *run.results, strict=True):
        check(
            trees == of_other,
            f"double_tree({n}) is {short(trees)} on rank 0, but {short(of_other)} on rank 1: all "
            "ranks need the same two trees.",
        )
        _check_trees(n, trees)


def _check_trees(n: int, trees: Trees) -> None:
    for which, parents in zip(("first", "second"), trees, strict=True):
        _check_tree(f"double_tree({n}), {which} tree", n, parents)
    first, second = (Counter(parents) for parents in trees)
    for rank in range(n):
        check(
            first[rank] + second[rank] <= 2,
            f"double_tree({n}): rank {rank} has {counted(first[rank], 'child', 'children')} in the "
            f"first tree and {second[rank]} in the second; together there may be two at most, or "
            f"the rank has more to receive than the others. The trees are {short(trees[0])} and "
            f"{short(trees[1])}. Who has children in one tree should be a leaf in the other.",
        )


def _check_tree(here: str, n: int, parents: Sequence[int]) -> None:
    check(
        len(parents) == n
        and parents.count(-1) == 1
        and all(-1 <= parent < n for parent in parents),
        f"{here}: there should be {counted(n, 'number')}, the parents of ranks 0 to {n - 1}, which "
        f"are ranks too, and -1 for the root alone; it is {short(parents)}.",
    )
    most = ceil(log2(n))
    for rank in range(n):
        depth = _depth(parents, rank)
        away = f"{depth} edges away from the root" if depth < n else "in a circle without a root"
        check(
            depth <= most,
            f"{here}: rank {rank} is {away}, and no rank should be more than ⌈log2 {n}⌉ = {most} "
            f"edges away: {short(parents)}. Put the root in the middle of the ranks, and do the "
            "same on both sides of it.",
        )


def _depth(parents: Sequence[int], rank: int) -> int:
    """Return how many edges a rank is away from the root.

    If the parents lead in a circle instead, return the number of ranks.
    """
    for depth in range(len(parents)):
        if parents[rank] < 0:
            return depth
        rank = parents[rank]
    return len(parents)


# Task 3.5: double_binary_tree_all_reduce

# Bytes, not latency, should account for most of the time.
FAST = Cluster(1, 32, latency_s=5e-7, nvlink_bytes_per_s=1 / BYTE_S)
SMALL = Cluster(1, 32, latency_s=LATENCY_S, nvlink_bytes_per_s=1 / BYTE_S)
TOLERANCE = 1.05
NOT_TOGETHER = (
    "Messages between two ranks wait for each other on NCCL, unless they start in one "
    "batch_isend_irecv. Let both ends of an edge handle a segment in the same step, and start all "
    "messages of a step together."
)


def _check_along_trees(call: Call) -> None:
    run, n, num_elements = call.run, call.n, call.kind.num_elements
    trees = run.results[0][0]["trees"]
    _check_trees(n, trees)
    sent: Counter[Edge] = Counter()
    for send, recv in run.trace.pairs() if run.trace else ():
        sent[send.rank, recv.rank] += send.num_bytes
    expected = _bytes_along(trees, num_elements, call.kind.item_bytes)
    for src, dst in sorted({*sent, *expected}):
        expect_cost(
            f"on {counted(n, 'rank')} and with the trees of your double_tree, x of "
            f"{num_elements:,} {call.kind.dtype}: the bytes that rank {src} sends to rank {dst}",
            *(sent[src, dst], expected[src, dst]),
            "Up and down each edge goes the half of x that belongs to the tree, once: the first "
            "half, as tensor_split cuts it, to the first tree.",
        )
    segment_bytes = call.variant.keywords["segment_bytes"]
    largest = max((send.num_bytes for send, _ in run.trace.pairs()), default=0) if run.trace else 0
    check_cost(
        largest <= segment_bytes,
        f"with segment_bytes={segment_bytes}, no message should hold more; one holds {largest:,} "
        "bytes. How many elements fit, and into how many segments must the longer half be cut?",
    )


def _bytes_along(trees: Trees, num_elements: int, item_bytes: int) -> Counter[Edge]:
    expected: Counter[Edge] = Counter()
    for parents, half in zip(trees, (-(-num_elements // 2), num_elements // 2), strict=True):
        for rank, parent in enumerate(parents):
            if parent >= 0 and half:
                expected[rank, parent] += item_bytes * half
                expected[parent, rank] += item_bytes * half
    return expected


class _DoubleTree(Contract):
    def drawn(self, random: Random, n: int) -> tuple[Any, Kind]:
        # Elements per segment; the first half of x fills whole segments, plus one element.
        fit = random.randrange(12, 22)
        kind = Kind((2 * fit * random.randrange(4, 7) + 1,))
        return self.collective.cut_into(4 * fit + 2), kind


DOUBLE = _DoubleTree(
    task="3.5",
    name="a_double_tree",
    collective=AlongTrees(
        "double_binary_tree_all_reduce",
        {"segment_bytes": 5000},
        advice="Is every element in one segment, does every segment go up and down once, and is "
        "the sum sent to all ranks? Add and send in the dtype of x: a cast loses digits.",
    ),
    worlds=(2, 3, 4, 5, 8, 1),
    length=lambda random: even_size(random, *LARGE),
    made_of=OF_MESSAGES,
    traffic=_check_along_trees,
    messages=_twice,
    rounds=None,
    late="",
    inboxes=lambda _rank: 4,
    memory="A rank needs x and at most four segments, such as one to receive into for each child, "
    "which it can reuse in every step. Parts of x are views: send them, and receive into them on "
    "the way down, without a copy.",
    options=replace(MEASURED, p2p_order="pair"),
    stuck=NOT_TOGETHER,
    kinds_on=(3,),
    bits_on=(6,),
)
globals().update(DOUBLE.tests())


@task("3.5")
@pytest.mark.parametrize(("n", "segment_bytes"), [(5, 2**17), (16, 440_000)])
def test_a_large_tensor_takes_little_more_than_its_bytes_twice(
    grade: Grade, n: int, segment_bytes: int
) -> None:
    num_elements = even_size(grade.random, *LARGE)
    run = _timed(grade, n, num_elements, segment_bytes, FAST)
    num_segments = ceil(num_elements / 2 / (segment_bytes // 4))
    num_steps = 2 * (num_segments + ceil(log2(n)) - 1)
    step_s = FAST.latency_s + 2 * segment_bytes * BYTE_S
    bytes_s = 8 * num_elements * BYTE_S
    check_cost(
        run.seconds <= TOLERANCE * num_steps * step_s,
        f"on {counted(n, 'rank')}, {num_segments} segments in each half should take at most 2(S + "
        f"⌈log2 N⌉ - 1) = {num_steps} steps of α + 2sβ, {1e6 * num_steps * step_s:,.0f} µs; yours "
        f"take {1e6 * run.seconds:,.0f} µs, where 2nβ is {1e6 * bytes_s:,.0f} µs. In each step, "
        "both trees should be busy, and a rank should pass on a segment while the next one "
        "arrives; a rank that waits for one tree holds up the other.",
    )


@task("3.5")
@pytest.mark.parametrize("n", [8, 24])
def test_a_small_tensor_takes_logarithmically_many_steps(grade: Grade, n: int) -> None:
    run = _timed(grade, n, grade.random.randrange(10, 30), 2**20, SMALL)
    most, taken = 2 * ceil(log2(n)), run.seconds / LATENCY_S
    check_cost(
        taken <= TOLERANCE * most,
        f"on {counted(n, 'rank')}, a tensor that fits into a segment should take at most "
        f"2⌈log2 N⌉ = {most} steps, each hardly longer than the latency α; yours takes {taken:.1f} "
        "α. The deepest leaves send in the first step, and each edge towards the root costs one "
        "more.",
    )


def _timed(grade: Grade, n: int, num_elements: int, segment_bytes: int, cluster: Cluster) -> Run:
    args = [DOUBLE.collective.cut_into(segment_bytes)], [Kind((num_elements,))], powers
    run = grade.run(use, n, *args, cluster=cluster)
    check_results(run.results, *args)
    return run


@task("3.5")
@pytest.mark.parametrize("n", [2, 5])
def test_any_size_is_cut_into_segments(grade: Grade, n: int) -> None:
    variants = [DOUBLE.collective.cut_into(num_bytes) for num_bytes in (8, 20, 64)]
    variants.append(replace(DOUBLE.collective, keywords={}))
    kinds = [Kind((size,), "float64") for size in (1, 2, 3, n, 2 * n + 1, 23)]
    args = variants, kinds, exact
    run = grade.run(
        *(use, n, *args),
        options=uneven(grade.random, n),
        if_stuck="Do all ranks cut both halves into the same number of segments, even where some "
        "are empty?",
    )
    check_results(run.results, *args, f"segment_bytes one of 8, 20, 64 and {2**19}, ")
